"""Training with elastic: equal bits on any number of processes, also if some die."""

import json
import os

import pytest

import geartrain as gt
from geartrain.callbacks import AsyncCheckpoint, ModelCheckpoint
from geartrain.loggers import CSVLogger
from geartrain_elastic import ElasticStrategy
from geartrain_parallel import rendezvous, sealed
from geartrain_resilience.preemption import Preemption
from geartrain_tensorboard import TensorBoard

from .models import Counting, Net, Saved, Widens, fit, state

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """What two ranks in two processes end with."""
    folder = tmp_path_factory.mktemp("quiet")
    return state(folder, fit(folder, 2)[1])


def test_one_process_has_the_bits_of_two(quiet, tmp_path):
    trainer, module = fit(tmp_path, 1)
    assert state(tmp_path, module) == quiet
    assert trainer.world_size == 2
    notes = trainer.plan.as_dict()["notes"]
    assert notes == {"system processes": "1 for 2 rank(s); a dead one is replaced"}


def test_processes_read_nothing_of_other_programs_in_the_store(quiet):
    store = rendezvous._program[os.getpid()]
    keys = [key for key in store.list_keys() if key.startswith("elastic/")]
    assert len(keys) >= 4  # of two processes, and of gloo
    for key in keys:
        assert sealed.unseal(store.get(key), key)


def test_ddp_has_the_same_bits(quiet, tmp_path):
    assert state(tmp_path, fit(tmp_path, 2, strategy="ddp_spawn", workers=1)[1]) == quiet


@pytest.mark.matrix
@pytest.mark.parametrize(("devices", "workers"), [(1, 2), (2, 0), (3, 1), (4, 0)])
def test_four_ranks_on_any_number_of_processes(tmp_path, devices, workers):
    alone = state(tmp_path / "one", fit(tmp_path / "one", 1, 4)[1])
    assert state(tmp_path / "n", fit(tmp_path / "n", devices, 4, workers=workers)[1]) == alone


@pytest.mark.matrix
def test_a_run_resumes_within_an_epoch_on_another_number_of_processes(tmp_path):
    whole, part, rest = (tmp_path / name for name in ("whole", "part", "rest"))
    expected, _ = state(whole, fit(whole, 2, 4, kind=Net)[1])
    saves = ModelCheckpoint(dirpath=part, filename="{step}", every_n_train_steps=4)
    fit(part, 4, 4, kind=Net, plugins=[saves])
    found, _ = state(rest, fit(rest, 1, 4, kind=Net, resume=part / "step=4.ckpt")[1])
    assert found == expected


@pytest.mark.parametrize(
    "kills",
    [
        [
            ("training_step", 3, 1, "real-time signal"),
            ("training_step", 5, 0, "error"),
            ("on_train_batch_end", 7, 1, "without logs"),
            ("training_step", 8, 0, "error"),
        ],
        pytest.param(
            [("training_step", 0, 0), ("validation_step", 5, 1), ("on_train_epoch_end", 10, 0)],
            marks=pytest.mark.matrix,
        ),
        pytest.param([("on_fit_end", 10, 0)], marks=pytest.mark.matrix),
        pytest.param(
            [("training_step", 3, 1, "hang"), ("training_step", 7, 0, "stop")],
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_ranks_that_fail_start_again(quiet, tmp_path, capfd, monkeypatch, kills):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "stopped=1")
    folder = tmp_path / "run"
    net = {"flags": str(tmp_path), "kills": kills}
    _, module = fit(folder, 2, workers=1, net=net, strategy_options={"timeout": 5.0})
    assert state(folder, module) == quiet
    said = capfd.readouterr().err
    assert said.count("; another one takes its place") == len(kills), said
    for way, text in {
        "real-time signal": "rank 1 was ended by signal 40;",
        "hang": "rank 1 kept the others waiting for 5 s (--strategy.timeout);",
        "stop": "rank 0 was stopped (SIGSTOP) for 1 s;",
    }.items():
        assert (text in said) is any(way in kill for kill in kills), said
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"


def test_a_killed_rank_leaves_the_files_of_a_quiet_run(tmp_path):
    """Also if it dies before its state was copied, and after a column made metrics.csv wider."""
    found = []
    kills = [("on_checkpoint_saved", 1, 0), ("on_checkpoint_saved", 7, 0)]
    for name in ("quiet", "killed"):
        folder = tmp_path / name
        weights = {"save_weights_only": True, "filename": "weights-{step}", "save_top_k": -1}
        plugins = [
            ModelCheckpoint(every_n_train_steps=1, **weights),
            ModelCheckpoint("loss_step", every_n_train_steps=1, save_top_k=2, save_last=True),
            CSVLogger(),
            CSVLogger(str(tmp_path / f"{name}.csv")),
            Saved(),
        ]
        net = {"flags": str(tmp_path), "kills": kills if name == "killed" else []}
        fit(folder, 2, net=net, kind=Widens, log_every_n_steps=1, plugins=plugins)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
        tables = folder / "metrics.csv", tmp_path / f"{name}.csv", folder / "metrics.jsonl"
        found.append((files, *(path.read_text() for path in tables)))
    assert all((tmp_path / f"killed-{number}").exists() for number in range(len(kills)))
    assert found[0][0] == found[1][0]
    assert found[0] == found[1]
    assert found[0][1] == found[0][2]


@pytest.mark.matrix
def test_tensorboard_has_each_point_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = []
    for name, kills in (
        ("quiet", []),
        ("killed", [("on_train_batch_end", 3, 0), ("training_step", 8, 0)]),
    ):
        folder = tmp_path / name
        net = {"flags": str(tmp_path), "kills": kills}
        fit(folder, 2, net=net, plugins=[TensorBoard()], log_every_n_steps=1)
        events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
        tags = events.Tags()["scalars"]
        points.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags})
        assert not list((folder / "tensorboard").glob("fit-*"))
    assert points[0] == points[1]
    assert [step for step, _ in points[0]["loss_step"]] == list(range(1, 11))


def test_the_others_take_over_the_ranks(quiet, tmp_path, capfd):
    net = {"flags": str(tmp_path), "kills": [("training_step", 4, 0)]}
    folder = tmp_path / "run"
    _, module = fit(folder, 2, net=net, strategy_options={"replace": False})
    assert state(folder, module) == quiet
    assert "SIGKILL; the others go on" in capfd.readouterr().err


@pytest.mark.matrix
def test_a_run_with_too_few_processes_ends(tmp_path):
    net = {"flags": str(tmp_path), "kills": [("training_step", 4, 0)]}
    options = {"replace": False, "min_processes": 2}
    with pytest.raises(gt.TrainingError, match=r"1 processes are left.* min_processes=2"):
        fit(tmp_path / "run", 2, net=net, strategy_options=options)


def test_a_rank_that_repeats_a_step_with_other_gradients_ends_the_run(tmp_path):
    net = {"flags": str(tmp_path), "kills": [("on_before_optimizer_step", 3, 1)]}
    with pytest.raises(gt.TrainingError, match=r"rank 1 cannot be taken over.*gradients differ.*F"):
        fit(tmp_path / "run", 2, net=net, kind=Counting)


def test_an_error_that_comes_again_ends_the_run(tmp_path, capfd):
    with pytest.raises(ValueError, match="my own error") as caught:
        fit(tmp_path / "run", 2, net={"raises": ("training_step", 3, 1)})
    assert caught.value.__notes__[-1] == "raised on rank 1"
    said = "rank 1 failed: ValueError: my own error; another one takes its place"
    assert said in capfd.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "ValueError: my own error")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 0}, "virtual_ranks=0 must be a whole number, 1 or more"),
        ({"threads": 1.5}, "threads=1.5 must be a whole number, 1 or more"),
        ({"timeout": 0}, "timeout=0 must be above 0"),
        ({"replace": "false"}, "replace='false' must be True or False"),
    ],
)
def test_options(options, message):
    with pytest.raises(gt.UsageError, match=message):
        ElasticStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy_options": {"virtual_ranks": 1}}, r"are fewer than the 2 processes.*Fix"),
        ({"num_nodes": 2}, r"one machine on the cpu, not on 2 node\(s\) with cpu. Fix"),
        ({"plugins": [AsyncCheckpoint()]}, "lose the file that it still writes. Fix: leave out"),
        ({"plugins": [Preemption()]}, "lets another one take its place. Fix: leave out preempt"),
        ({"reload_dataloaders_every_n_epochs": 2}, "of an earlier epoch. Fix: reload_data.*s=1"),
    ],
)
def test_plans(options, message, tmp_path):
    options = {"strategy": "elastic", "output": tmp_path / "run", **options}
    trainer = gt.Trainer(accelerator="cpu", devices=2, max_steps=1, **options)
    with pytest.raises(gt.UsageError, match=message):
        trainer.fit(Net(), [])
