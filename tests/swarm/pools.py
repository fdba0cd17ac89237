"""The values of a draw by factor: all that torch and geartrain's entry points have.

A pool is enumerated by code. A class that needs arguments has them in a table here; a new class
without an entry is built without arguments, and test_pools.py fails if that does not work.
"""

import importlib.util
import inspect
import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils import data

import geartrain_callbacks
from geartrain import CombinedLoader, Module
from geartrain.callbacks import Callback

# --- optimizers -----------------------------------------------------------------------------------

#: Arguments by optimizer; of those that are not named: ``lr=0.01``.
OPTIMIZER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Rprop": {"lr": 0.001},
}


def public(module: Any, base: type) -> dict[str, Any]:
    """Return the subclasses of a class that a module has, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and not name.startswith("_")
    }


@cache
def optimizers() -> list[str]:
    return sorted(public(torch.optim, torch.optim.Optimizer).keys() - {"Optimizer"})


def optimizers_of(
    name: str, parameters: list[nn.Parameter], sparse: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Return an optimizer of some parameters, and one of those that its class refuses.

    Args:
        sparse: those with sparse gradients.
    """
    options = OPTIMIZER_ARGUMENTS.get(name, {"lr": 0.01})
    if name == "Muon":  # matrices alone
        suited = [parameter for parameter in parameters if parameter.ndim == 2]
    elif name == "SparseAdam":  # sparse gradients alone
        suited = [each for each in parameters if any(each is one for one in sparse)]
    else:
        suited = parameters
    chosen = {id(parameter) for parameter in suited}
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    made = [getattr(torch.optim, name)(suited, **options)] if suited else []
    return [*made, torch.optim.SGD(others, lr=0.05)] if others else made


# --- schedulers -----------------------------------------------------------------------------------


def half(step: int) -> float:
    return 0.5**step


#: Arguments by scheduler, short enough that each changes the rate within a run.
SCHEDULER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": half},
    "MultiplicativeLR": {"lr_lambda": half},
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 2, 5, 9, 9], "gamma": 0.7},
    "ConstantLR": {"factor": 0.5, "total_iters": 2},
    "LinearLR": {"start_factor": 0.2, "total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 4},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.05, "step_size_up": 2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 40, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 0, "factor": 0.5, "threshold": 0.1},
    "SWALR": {"swa_lr": 0.02, "anneal_epochs": 3},
}
NESTS = ("SequentialLR", "ChainedScheduler")


@cache
def schedulers() -> list[str]:
    """Return all schedulers but those that hold others."""
    both = public(lr_scheduler, lr_scheduler.LRScheduler) | public(
        swa_utils, lr_scheduler.LRScheduler
    )
    return sorted(both.keys() - {"LRScheduler", *NESTS})


@cache
def nested() -> list[str]:
    """Return the schedulers that may be inside of others: ReduceLROnPlateau needs a metric."""
    return [name for name in schedulers() if name != "ReduceLROnPlateau"]


def scheduler_of(text: str, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that a text such as ``"SequentialLR(StepLR,LinearLR)"`` means."""
    name, _, inside = text.partition("(")
    if name in NESTS:
        parts = [scheduler_of(part, optimizer) for part in split(inside.removesuffix(")"))]
        if name == "ChainedScheduler":
            return lr_scheduler.ChainedScheduler(parts, optimizer)
        return lr_scheduler.SequentialLR(optimizer, parts, [2 * n for n in range(1, len(parts))])
    made = getattr(lr_scheduler, name, None) or getattr(swa_utils, name)
    return made(optimizer, **SCHEDULER_ARGUMENTS.get(name, {}))


@cache
def torch_can(text: str) -> bool:
    """True if torch itself can step a scheduler: it nests some in others only."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    try:
        with warnings.catch_warnings(action="ignore"):
            made = scheduler_of(text, optimizer)
            for _ in range(5):
                optimizer.step()
                made.step(*([1.0] if text == "ReduceLROnPlateau" else []))
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return False
    return True


def split(text: str) -> list[str]:
    """Split at the commas that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# --- parts of ours --------------------------------------------------------------------------------

PLACE = {"dirpath": "FOLDER/checkpoints"}
#: Options of plugins that need some, or that would do nothing in a short run without. Several dicts
#: are several variants. ``MONITOR`` and ``FOLDER`` are replaced.
PLUGIN_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "accumulation_scheduler": [{"scheduling": {0: 1, 1: 2}}, {"scheduling": {0: 2, 2: 3}}],
    "activation_checkpointing": [{"units": "Linear"}],
    "backbone_finetuning": [{"unfreeze_backbone_at_epoch": 1, "backbone_initial_lr": 0.01}],
    "csv": [{"path": "FOLDER/metrics.csv"}],
    "chaos": [{"slow": "rank=0,step=2,seconds=0.01"}],
    "compile": [{"backend": "eager"}],
    "early_stopping": [
        {"monitor": "MONITOR", "patience": 1, "min_delta": 0.01},
        {"monitor": "MONITOR", "patience": 1, "mode": "max"},
        {"monitor": "MONITOR", "patience": 3},
    ],
    "ema": [{"decay": 0.8}, {"decay": 0.5, "every": 2, "start_step": 3}],
    "model_checkpoint": [
        {"monitor": "MONITOR", "save_top_k": 2, "filename": "best-{epoch}-{step}", **PLACE},
        {"every_n_train_steps": 2, "save_top_k": -1, "filename": "step-{step}", **PLACE},
        {"monitor": "step", "mode": "max", "every_n_train_steps": 1, **PLACE},
        {"save_last": True, "filename": "last-{epoch}", **PLACE},
    ],
    "norms": [{}, {"parameters": True, "every": 2}],
    "prediction_writer": [{"output_dir": "FOLDER"}],
    "profile": [{"trace": False, "wait": 1, "warmup": 1, "active": 1}],
    "remote": [{"url": "file://FOLDER/remote"}],
    "swa": [{"swa_lrs": 0.05, "swa_epoch_start": 1, "annealing_epochs": 2}],
    "timer": [{"duration": "00:01:00:00"}],
    "EMAWeightAveraging": [{"decay": 0.8}],
    "LambdaCallback": [{"on_train_epoch_end": print}],
    "ThroughputMonitor": [{"batch_size_fn": len}],
    "throughput": [{"flops": False}],
    "wandb": [{"mode": "disabled"}],
}
#: Plugins that replace the weights by an average.
AVERAGES = ("ema", "swa", "WeightAveraging", "EMAWeightAveraging")
#: Plugins that no draw has, with the reason.
LEFT_OUT = {
    "locked": "it compares versions of distributions with a file; nothing of a run",
    "restarts": "it needs a command line; tests/resilience has it",
    "mlflow": "its import takes seconds and it needs a database; tests/loggers has it",
}
#: By the name of an entry point that adds a plugin to a run: the trainer's option, or the module's
#: method (see program.py), that asks for it.
IMPLIED: dict[str, dict[str, Any]] = {
    "output": {},  # each run has a folder
    "max_time": {"max_time": "00:01:00:00"},
    "overfit_batches": {"overfit_batches": 2},
    "deterministic": {"deterministic": True},
    "fit.detect_anomaly": {"detect_anomaly": True},
    "fit.reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "fit.timedelta.val_check_interval": {"val_check_interval": "00:01:00:00"},
    "fit.sync_batchnorm": {"sync_batchnorm": True},
}
#: Options of strategies, so that they divide the model of a draw.
STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "horovod": {"scale_lr": False},
    "tensor_parallel": {"colwise": "backbone.0", "rowwise": "backbone.2"},
    "fsdp": {"units": "Linear"},
    "elastic": {"timeout": 20},  # after which a process that hangs is replaced
}
#: Strategies whose ranks have parts of the model.
SHARDED = ("fsdp", "ddp_sharded", "tensor_parallel", "deepspeed")


@cache
def entries(group: str) -> dict[str, Any]:
    """Return the entry points of a group of ours by name."""
    return {entry.name: entry for entry in entry_points(group=f"geartrain.{group}")}


@cache
def callbacks() -> dict[str, type]:
    """Return the exported callbacks that no entry point has, by name."""
    exported = {name: getattr(geartrain_callbacks, name) for name in geartrain_callbacks.__all__}
    base = (Callback, geartrain_callbacks.BaseFinetuning, geartrain_callbacks.BasePredictionWriter)
    named = {entry.load() for entry in entries("plugins").values() if "callbacks" in entry.value}
    return {
        name: thing
        for name, thing in exported.items()
        if isinstance(thing, type) and issubclass(thing, Callback) and thing not in (*base, *named)
    }


@cache
def plugins() -> list[str]:
    """Return each plugin, with a number if it has several variants: ``"ema.1"``."""
    only_implied = {entry.value for entry in entries("implied").values()} - {"provenance", "timer"}
    named = [n for n in sorted(entries("plugins")) if n not in LEFT_OUT and n not in only_implied]
    return [
        f"{name}.{number}" if number else name
        for name in [*named, *callbacks()]
        for number in range(len(PLUGIN_OPTIONS.get(name, [{}])))
    ]


@cache
def implied() -> list[str]:
    """Return the options and methods that add a plugin to a run."""
    elsewhere = {"output", "max_restarts", "fit.Module.automatic_optimization"}
    return sorted(entries("implied").keys() - elsewhere)


def plugin_of(text: str, monitor: str, folder: str) -> Any:
    """Return the plugin that a name of :func:`plugins` means."""
    name, _, number = text.partition(".")
    options = PLUGIN_OPTIONS.get(name, [{}])[int(number or 0)]
    words = {"MONITOR": monitor, "FOLDER": folder}
    filled = {
        key: value.replace("FOLDER", folder) if value not in words else words[value]
        for key, value in options.items()
        if isinstance(value, str)
    }
    cls = callbacks().get(name) or entries("plugins")[name].load()
    return cls(**{**options, **filled})


@cache
def strategies() -> list[str]:
    """Return the installed strategies whose requirements are installed, and thread ranks."""
    needs = {"horovod": "horovod.torch", "deepspeed": "deepspeed"}
    names = [n for n in sorted(entries("strategies")) if n not in needs or has(needs[n])]
    return ["threads", *names]


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@cache
def precisions() -> list[str]:
    return sorted(entries("precisions"))


@cache
def module_hooks() -> list[str]:
    """Return the events that a module may implement, and that come more than once in a run.

    With ``on_save_checkpoint`` a module saves its weights under other names.
    """
    once = ("on_fit_start", "on_fit_end", "on_train_start", "on_train_end")
    other = ("_checkpoint", "_transfer")  # these get or return something
    return ["on_save_checkpoint"] + [
        name
        for name in dir(Module)
        if name.startswith("on_")
        and name not in once
        and not name.endswith(other)
        and "sanity" not in name
        and not name.startswith(("on_test", "on_predict"))
    ]


# --- data -----------------------------------------------------------------------------------------


@cache
def samplers() -> list[str]:
    """Return torch's samplers of single samples."""
    return sorted(public(data, data.Sampler).keys() - {"Sampler", "BatchSampler"})


@cache
def datasets() -> list[str]:
    """Return torch's datasets that hold or combine data."""
    pipes = {name for name in public(data, data.Dataset) if "Pipe" in name}
    return sorted(public(data, data.Dataset).keys() - pipes - {"Dataset", "IterableDataset"})


@cache
def combined_modes() -> list[str]:
    modes: tuple[str, ...] = importlib.import_module(CombinedLoader.__module__).MODES
    return sorted(modes)


#: Loaders that are no class of torch.
OWN_LOADERS = (
    "plain",
    "shuffled",
    "generator",
    "drop_last",
    "workers",
    "persistent",
    "batch_sampler",
    "own_sampler",
    "own_batch_sampler",
    "iterable",
    "iterable_workers",
    "list",
    "own",
    "stateful",
    "noisy",
    "several",
)


@cache
def loaders() -> list[str]:
    return [
        *OWN_LOADERS,
        *(f"sampler:{name}" for name in samplers()),
        *(f"dataset:{name}" for name in datasets()),
        *(f"combined:{mode}" for mode in combined_modes()),
        *(["torchdata"] if has("torchdata") else []),
    ]
