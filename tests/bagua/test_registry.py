"""Choosing an algorithm by name, also from other distributions; only the chosen one is imported."""

import inspect
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from importlib_metadata import EntryPoint
from several_ranks import results

import geartrain as gt
from geartrain_bagua import Algorithm, BaguaStrategy, QAdamOptimizer, choosing
from geartrain_bagua.algorithms.gradient_allreduce import GradientAllReduce
from geartrain_bagua.choosing import algorithm_class
from geartrain_bagua.minmax_uint8 import compress

ALGORITHMS = "geartrain_bagua.algorithms."

MINE = """
from geartrain_bagua import Algorithm
import torch.distributed as dist


class Signs(Algorithm):
    '''Gradients become the mean of their signs.

    Args:
        times: the factor of the mean.
        kind: the kind of sign.
    '''

    reduces = "gradients"

    def __init__(self, times: float = 1.0, kind: str = "plain") -> None:
        self.times, self.kind = times, kind

    def reduce(self, bucket):
        bucket.flat.sign_().mul_(self.times / self.context.everyone.size)
        dist.all_reduce(bucket.flat, group=self.context.everyone.group)
"""
TRAIN = """
import torch
import geartrain as gt


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(self.net.weight, 2.0)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return [torch.tensor([[1.0, 1.0]])]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)

    def on_train_end(self):
        print("weights", self.net.weight.tolist())
"""


def install(folder, name, algorithms):
    """Write a distribution with algorithms, as pip installs it."""
    (folder / f"{name}.py").write_text(MINE)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    points = [f"{key} = {value}" for key, value in algorithms.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{choosing.GROUP}]", *points, ""]))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with two other distributions with algorithms."""
    site = tmp_path_factory.mktemp("site")
    broken = {"broken": "mine_broken:Broken", "absent": "mine:Absent", "no_class": "mine:dist"}
    install(site, "mine", {"signs": "mine:Signs", "shared": "mine:Signs", **broken})
    install(site, "theirs", {"shared": "theirs:Signs"})
    return site


@pytest.fixture(scope="module")
def run(site):
    """``run("errors.py", folder)``: run Python beside the distributions."""

    def run(*arguments, folder):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=150,
        )

    return run


def make_errors(site):
    """Return errors by the algorithm's name, and modules that were imported."""
    sys.path.insert(0, site)

    def error(**options):
        try:
            gt.Trainer(accelerator="cpu", strategy="bagua", strategy_options=options)
        except gt.UsageError as error:
            return str(error)

    for name in [name for name in sys.modules if name.startswith(ALGORITHMS)]:
        del sys.modules[name]
    names = ("shared", "broken", "absent", "no_class", "sings", "signs")
    found = {name: error(algorithm=name) for name in names}
    found["option"] = error(algorithm="signs", time=2.0)
    found["type"] = error(algorithm="signs", times="twice")
    found["of gradient_allreduce"] = error(times=2.0)
    compress(torch.randn(2, 9))
    found["triton"] = "triton" in sys.modules
    found["imported"] = sorted(name for name in sys.modules if name.startswith(ALGORITHMS))
    return found


@pytest.fixture(scope="module")
def errors(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    return results(folder, make_errors, str(site), ranks=1, place="alone")[0]


def test_an_error_names_the_reason(errors):
    assert "mine[shared] and theirs[shared] claim the same name" in errors["shared"]
    assert (
        "mine[broken] could not be imported: ModuleNotFoundError: No module named 'mine_broken'"
        in errors["broken"]
    )
    assert "mine[absent] could not be imported: AttributeError" in errors["absent"]
    assert "which is no geartrain_bagua.Algorithm" in errors["no_class"]
    assert "there is no algorithm 'sings'. Did you mean 'signs'?" in errors["sings"]
    assert "'signs'? Known: absent, async, broken, bytegrad" in errors["sings"]
    assert errors["signs"] is None


def test_options_are_checked_against_the_algorithm(errors):
    assert "the algorithm 'signs' has no option 'time'. Did you mean 'times'?" in errors["option"]
    assert "'times'? Its options: times, kind." in errors["option"]
    assert "the algorithm 'signs': times='twice' is no float" in errors["type"]
    of_another = errors["of gradient_allreduce"]
    assert "the algorithm 'gradient_allreduce' has no option 'times'. Its options:" in of_another
    assert "'times'. Its options: hierarchical, average." in of_another


def test_only_the_chosen_algorithm_is_imported(errors):
    assert errors["imported"] == ["geartrain_bagua.algorithms.gradient_allreduce"]


def test_compression_on_the_cpu_imports_no_triton(errors):
    assert not errors["triton"]


@pytest.mark.end_to_end
@pytest.mark.timeout(400)  # four programs
def test_another_distributions_algorithm_trains(run, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "geartrain_command.py").write_text(
        "import sys\nfrom geartrain.commands import main\nsys.exit(main())\n"
    )
    options = ("--strategy", "bagua", "--strategy.algorithm", "signs", "--accelerator", "cpu")

    def fit(*arguments):
        command = ("geartrain_command.py", "fit", "train.py", *options)
        return run(*command, *arguments, folder=tmp_path)

    help_text = fit("--help").stdout
    assert "--strategy.times X" in help_text
    assert "the factor of the mean" in help_text
    refused = fit("--strategy.times", "twice")
    assert refused.returncode == 2
    assert "--strategy.times" in refused.stderr
    unknown = fit("--strategy.hierarchical", "true")
    assert unknown.returncode == 2
    assert "there is no option --strategy.hierarchical" in unknown.stderr
    done = fit("--strategy.times=0.5", "--devices", "2", "--max-epochs", "1", "-q")
    assert done.returncode == 0, done.stderr
    assert "weights [[1.5, 1.5]]" in done.stdout


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("strategy: {name: bagua, algorithm: half, dtype: fp16}", ()),
        ("strategy: bagua\nstrategy.algorithm: half\nstrategy.dtype: fp16", ()),
        (
            "strategy: {name: bagua, algorithm: bytegrad}",
            ("--strategy.algorithm", "half", "--strategy.dtype=fp16"),
        ),
    ],
    ids=["nested", "dotted", "overruled"],
)
def test_the_algorithm_of_a_config_file_has_its_options(tmp_path, config, arguments, request):
    from geartrain_cli.arguments import read_arguments

    target = tmp_path / f"train_{request.node.callspec.id}.py"  # its module's name
    target.write_text(TRAIN)
    (tmp_path / "config.yaml").write_text(config)
    config_file = str(tmp_path / "config.yaml")
    given = [str(target), "--config", config_file, "--accelerator", "cpu", *arguments]
    trainer = read_arguments("fit", given, None).trainer
    strategy = next(part.plugin for part in trainer.setup.parts if part.info.kind == "strategy")
    assert type(strategy.algorithm).__name__ == "HalfAllReduce"
    assert strategy.algorithm.dtype == "fp16"


# --- in Python ------------------------------------------------------------------------------------


def test_an_algorithm_may_be_a_class_or_an_object():
    made = GradientAllReduce(average=False)
    assert BaguaStrategy(algorithm=made).algorithm is made
    assert BaguaStrategy(algorithm=GradientAllReduce, average=False).algorithm.average is False
    with pytest.raises(gt.UsageError, match="is made already, and takes no average"):
        BaguaStrategy(algorithm=made, average=True)
    with pytest.raises(gt.UsageError, match=r"is no geartrain_bagua\.Algorithm"):
        BaguaStrategy(algorithm=dict)


def test_a_checkpoint_has_the_same_name_for_every_way_of_choosing():
    ways = ["gradient_allreduce", "Gradient_AllReduce", GradientAllReduce, GradientAllReduce()]
    assert {BaguaStrategy(algorithm=way).state_dict()["algorithm"] for way in ways} == {
        "gradient_allreduce"
    }
    for saves, loads in itertools.product(ways, ways):
        BaguaStrategy(algorithm=loads).load_state_dict(BaguaStrategy(algorithm=saves).state_dict())

    class Mine(GradientAllReduce): ...

    for mine in (Mine, Mine()):
        assert BaguaStrategy(algorithm=mine).state_dict()["algorithm"] == "Mine"


class Typed(Algorithm):
    def __init__(
        self, n: int = 1, share: float | None = None, on: bool = False, any_thing=None
    ) -> None:
        self.n, self.share, self.on, self.any_thing = n, share, on, any_thing


@pytest.mark.parametrize(
    "right",
    [
        {"n": 2},
        {"share": 1},
        {"share": 0.5},
        {"share": None},
        {"on": True},
        {"any_thing": object()},
    ],
)
def test_options_of_the_right_type_are_passed_on(right):
    algorithm = BaguaStrategy(algorithm=Typed, **right).algorithm
    assert {name: getattr(algorithm, name) for name in right} == right


@pytest.mark.parametrize(
    "wrong", [{"n": 1.5}, {"n": True}, {"share": "half"}, {"share": False}, {"on": 1}]
)
def test_options_of_a_wrong_type_are_refused(wrong):
    with pytest.raises(gt.UsageError, match=f"the algorithm 'Typed': {next(iter(wrong))}="):
        BaguaStrategy(algorithm=Typed, **wrong)


def test_an_option_of_the_strategys_name_is_refused():
    class Waits(Algorithm):
        def __init__(self, timeout: float = 1.0) -> None: ...

    message = "Waits: its option 'timeout' is also an option of BaguaStrategy"
    with pytest.raises(gt.UsageError, match=message):
        BaguaStrategy(algorithm=Waits)


@pytest.mark.parametrize("made", [False, True])
def test_a_misspelt_method_is_refused(made):
    class Ends(Algorithm):
        def end_steps(self): ...

    with pytest.raises(
        gt.UsageError,
        match=r"algorithm Ends: its end_steps would never be called\. Did you mean 'end_step'\?",
    ):
        BaguaStrategy(algorithm=Ends() if made else Ends)


def test_geartrain_baguas_algorithm_wins_over_another_of_its_name(monkeypatch):
    theirs = EntryPoint("ByteGrad", "acme_absent:ByteGrad", choosing.GROUP)._for(
        SimpleNamespace(name="acme")
    )
    real = choosing.entry_points
    monkeypatch.setattr(choosing, "entry_points", lambda **wanted: [theirs, *real(**wanted)])
    with pytest.warns(
        UserWarning,
        match=r"algorithm 'bytegrad' is geartrain-bagua's; not used: acme\[ByteGrad\]",
    ):
        assert algorithm_class("bytegrad").__module__ == "geartrain_bagua.algorithms.bytegrad"


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("bucket_bytes", wrong) for wrong in (0, 1.5, True)),
        *(("timeout", wrong) for wrong in (0, float("nan"), 1e10)),  # no thread can wait so long
    ],
)
def test_numbers_out_of_range_are_refused(option, wrong):
    with pytest.raises(gt.UsageError, match=re.escape(f"{option}={wrong!r} must be ")):
        BaguaStrategy(**{option: wrong})


@pytest.mark.parametrize(
    ("name", "arguments"),
    {
        "gradient_allreduce": {"hierarchical": False, "average": True},
        "bytegrad": {"hierarchical": True, "average": True},
        "qadam": {"hierarchical": True},
        "decentralized": {
            "hierarchical": True,
            "peer_selection_mode": "all",
            "communication_interval": 1,
        },
        "low_precision_decentralized": {"hierarchical": True, "communication_interval": 1},
        "async": {"peer_selection_mode": "all", "sync_interval_ms": 500, "warmup_steps": 0},
        QAdamOptimizer: {
            "lr": 1e-3,
            "warmup_steps": 100,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
        },
    }.items(),
)
def test_arguments_and_defaults_are_baguas(name, arguments):
    made = name if name is QAdamOptimizer else algorithm_class(name)
    found = {
        key: parameter.default
        for key, parameter in inspect.signature(made).parameters.items()
        if key != "params"
    }
    assert found == arguments
    assert list(found) == list(arguments)  # positional arguments are equal too
    assert list(map(type, found.values())) == list(map(type, arguments.values()))
