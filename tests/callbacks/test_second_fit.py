"""Two fits of one Trainer, or of one object in two Trainers: each is as if it were the first.

The pool is every plugin and precision of the geartrain distributions, and every callback.
"""

import inspect
from importlib.metadata import entry_points

import pytest
import torch
from small_models import trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
import geartrain_callbacks

#: Class -> its arguments. ``DIR`` is a new folder for each object.
ARGUMENTS = {
    "ActivationCheckpointing": {"units": "Linear"},
    "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1},
    "Chaos": {"slow": "rank=0,step=2,seconds=0.001"},
    "EMA": {"decay": 0.5},
    "EMAWeightAveraging": {"decay": 0.5},
    "EarlyStopping": {"monitor": "v", "patience": 1},
    "GradientAccumulationScheduler": {"scheduling": {0: 2, 1: 1}},
    "LearningRateMonitor": {"log_momentum": True},
    "ModelCheckpoint": {
        "monitor": "v",
        "save_top_k": 2,
        "dirpath": "DIR",
        "filename": "{epoch}-{v:.0f}",
    },
    "NaNGuard": {"action": "skip"},
    "PredictionWriter": {"output_dir": "DIR"},
    "Profile": {"trace": False},
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 0.5},
    "ThroughputMonitor": {"batch_size_fn": len},
    "Timer": {"duration": "00:01:00:00"},
}
#: Classes that need a folder for the run.
WRITES = {
    "AsyncCheckpoint",
    "CSVLogger",
    "Chaos",
    "Preemption",
    "Profile",
    "Provenance",
    "TensorBoard",
}
#: Class -> the argument of Trainer that adds it, if it is added in no other way.
ADDED = {
    "DetectAnomaly": {"detect_anomaly": True},
    "Deterministic": {"deterministic": "warn"},
    "Overfit": {"overfit_batches": 3},
    "ReloadDataloaders": {"reload_dataloaders_every_n_epochs": 2},
    "TimedValidation": {"val_check_interval": {"milliseconds": 1}},
    "EvaluationOutputs": {},  # of the module, as the next two
    "TrainingOutputs": {},
    "Overrides": {},
    "SyncBatchNorm": {"sync_batchnorm": True},
}
#: Classes that cannot be fitted with here.
LEFT_OUT = {
    **dict.fromkeys(("BaseFinetuning", "BasePredictionWriter", "Callback"), "abstract"),
    **dict.fromkeys(("CombinedLoader", "EarlyStoppingReason"), "no callback"),
    **dict.fromkeys(("Histogram", "Media", "Table"), "no callback"),
    **dict.fromkeys(("MixedPrecision", "ScaledPrecision", "TruePrecision"), "precisions, below"),
    **dict.fromkeys(("MLflow", "WandB", "Remote"), "needs a server"),
    **dict.fromkeys(("Restarts", "Locked"), "of the command line"),
    "Compile": "takes seconds, and keeps no state",
    "ManualOptimisation": "of a module that optimizes manually",
    "RichProgressBar": "needs rich",
    "TQDMProgressBar": "ProgressBar's",
    "LambdaCallback": "keeps no state",
}
#: Attributes that hold times, random ids and objects of one run.
OF_ONE_RUN = {
    *("experiment", "_identity", "identity", "_output", "output", "time_elapsed"),
    *("_began", "_checked_at", "_elapsed", "_paused", "_pauses", "_points", "_started", "_written"),
}


def plugins():
    """Return our plugins and callbacks by the names of their classes."""
    points = entry_points(group="geartrain.plugins")
    found = [p.load() for p in points if p.value.startswith("geartrain_")]
    found += [getattr(geartrain_callbacks, name) for name in geartrain_callbacks._HOMES]
    return {each.__name__: each for each in found if inspect.isclass(each)}


class Fold(gt.Module):
    """One fold of a cross-validation; in the first the metric ``v`` grows, and training stops."""

    def __init__(self, fold):
        super().__init__()
        torch.manual_seed(fold)
        self.backbone, self.head = (
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            nn.Linear(2, 1),
        )
        self.fold = fold

    def training_step(self, batch, batch_idx):
        loss = self.head(self.backbone(batch[0])).pow(2).mean()
        self.log("loss", loss)
        return loss

    def training_epoch_end(self, outputs):
        self.log("outputs", len(outputs))

    def validation_step(self, batch, batch_idx):
        self.log("v", self.current_epoch + 1.0 if self.fold == 0 else 9.0 - self.current_epoch)

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    def train_dataloader(self):
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=4)


def plain(value, folder):
    """Return nested numbers, texts and tensors, without the folder; ``...`` for others."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, str):
        return value.replace(str(folder), "DIR").replace("-v1", "")  # of a name that is taken
    if isinstance(value, dict):
        return {plain(k, folder): plain(v, folder) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, folder) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else ...


def state(plugin, folder):
    """Return what users can see of a plugin after a fit, and what its next fit could take over."""
    public = [n for n in dir(type(plugin)) if isinstance(getattr(type(plugin), n), property)]
    values = {**vars(plugin), **{n: getattr(plugin, n) for n in public if n not in OF_ONE_RUN}}
    values |= plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    return {n: plain(value, folder) for n, value in values.items() if n not in OF_ONE_RUN}


def fitted(one, plugin, folder, fold):
    module = Fold(fold)
    one.fit(module)
    # Speeds are not the same twice.
    metrics = {n: float(v) for n, v in one.callback_metrics.items() if "/" not in n}
    return {
        "counts": (one.global_step, one.current_epoch),
        "weights": [tensor.tolist() for tensor in module.state_dict().values()],
        "trainable": [parameter.requires_grad for parameter in module.parameters()],
        "metrics": metrics,
        "plugin": {} if plugin is None else state(plugin, folder),
    }


def check(make, tmp_path, **options):
    """Compare fits that share a Trainer, or objects of it, with fits that share nothing."""
    writes = {"output"} if options.pop("writes", False) else set()

    def trainer_of(plugin, folder):
        given = [] if plugin is None else [plugin]
        place = {"output": folder / "run"} if writes else {}
        return trainer(plugins=given, max_epochs=2, seed=1, **place, **options)

    folder = tmp_path / "alone"
    plugin = make(folder)
    alone = fitted(trainer_of(plugin, folder), plugin, folder, 1)
    folder = tmp_path / "shared"
    plugin = make(folder)
    first, other = trainer_of(plugin, folder), trainer_of(plugin, tmp_path / "other")
    fitted(first, plugin, folder, 0)
    for one in (first, other):
        result = fitted(one, plugin, folder, 1)
        for name, value in alone.items():
            assert result[name] == value, f"{name} with {'one Trainer' if one is first else 'two'}"


def arguments(name, folder):
    given = ARGUMENTS.get(name, {})
    return {key: str(folder / "own") if value == "DIR" else value for key, value in given.items()}


def cases():
    """Yield the plugins; the default suite tries those that keep a state in checkpoints."""
    for name in sorted(plugins().keys() - LEFT_OUT.keys() - ADDED.keys()):
        keeps_state = hasattr(plugins()[name], "state_dict")
        yield pytest.param(name, marks=() if keeps_state else pytest.mark.matrix)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", cases())
def test_a_plugin_starts_each_fit_from_scratch(name, tmp_path):
    cls = plugins()[name]
    check(lambda folder: cls(**arguments(name, folder)), tmp_path, writes=name in WRITES)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [*ADDED.values(), *({"precision": p.name} for p in entry_points(group="geartrain.precisions"))],
    ids=str,
)
def test_a_plugin_that_an_argument_adds_starts_each_fit_from_scratch(options, tmp_path):
    check(lambda folder: None, tmp_path, **options)
