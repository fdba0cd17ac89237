"""The run's folder, and checkpoints: written whole, read safely, refused if they do not fit."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from small_models import (
    DEADLINE,
    EvalNet,
    Logging,
    Net,
    Pretend,
    assert_equal,
    by_hand,
    differ,
    fit,
    loader,
    trainer,
    weights,
)
from torch import nn

import geartrain as gt
from geartrain import GeartrainError, Session, TrainingError, UsageError, hookimpl
from geartrain.builtin.run_folder import _locked
from geartrain.files import atomic as whole_files

from ..files.test_atomic import files_of_at_most


def files_of_core(folder):
    """Return the names of a run's files, without the one that geartrain-callbacks adds."""
    return sorted({*os.listdir(folder)} - {"provenance.jsonl"})


def read(path):
    return json.loads(path.read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Logs(EvalNet):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        self.log("hidden", 2.0, logger=False)
        return super().training_step(batch, batch_idx)


def test_a_folder_that_the_user_removes_during_the_run_is_made_again_with_a_warning(tmp_path):
    class Removes(Logs):
        def on_train_epoch_start(self):
            if self.trainer.current_epoch == 1:
                shutil.rmtree(tmp_path)

    with pytest.warns(UserWarning, match=r"metrics\.jsonl was removed or moved during the run"):
        fit(Removes(), output=tmp_path, max_epochs=2)
    assert {"plan.json", "metrics.jsonl", "summary.json", "last.ckpt"} <= {*os.listdir(tmp_path)}
    assert read(tmp_path / "summary.json")["status"] == "done"
    assert [one["epoch"] for one in lines(tmp_path / "metrics.jsonl")] == [1]


# --- contents -------------------------------------------------------------------------------------


def test_the_plan_has_the_batch_size_of_a_loader_that_the_module_made(tmp_path):
    class Makes(Logs):
        batch_size = 5

        def train_dataloader(self):
            return loader(batch_size=self.batch_size)

    class Data(gt.DataModule):
        batch_size = 12  # of two loaders together

        def train_dataloader(self):
            return loader(batch_size=6)

    for number, (module, data, size) in enumerate([(Makes(), None, 5), (Logs(), Data(), 6)]):
        one = trainer(output=tmp_path / str(number), accumulate_grad_batches=2)
        one.fit(module, datamodule=data)
        assert read(tmp_path / str(number) / "plan.json")["batch_size"] == {
            "per_device": size,
            "global": 2 * size,
        }
        assert one.plan.global_batch == 2 * size


def test_a_run_writes_plan_metrics_summary_and_checkpoint(tmp_path):
    folder = tmp_path / "new" / "run"
    one = fit(Logs(), val=loader(), output=str(folder), max_epochs=2, log_every_n_steps=4)
    files = ["last.ckpt", "metrics.jsonl", "plan.json", "summary.json"]
    assert files_of_core(folder) == files

    plan = read(folder / "plan.json")
    assert plan == json.loads(json.dumps(one.plan.as_dict()))
    assert plan["batch_size"] == {"per_device": 4, "global": 4}

    metrics = lines(folder / "metrics.jsonl")
    assert metrics[0] == {"step": 4, "epoch": 0, "stage": "train", "loss": 1.0}
    assert [line["step"] for line in metrics] == [4, 6, 6, 8, 12, 12]
    assert [line["stage"] for line in metrics if "val_loss" in line] == ["validate", "validate"]
    assert not any("hidden" in line for line in metrics)

    summary = read(folder / "summary.json")
    expected = {"status": "done", "command": "fit", "steps": 12, "epochs": 2}
    assert expected.items() <= summary.items()
    assert summary["metrics"] == one.callback_metrics
    assert 0 <= summary["seconds"] < 60


def test_metrics_are_on_disk_during_the_run(tmp_path):
    class Reads:
        seen = ()

        @hookimpl
        def on_step_end(self, run):
            self.seen = (*self.seen, len(lines(run.output / "metrics.jsonl")))

    reads = Reads()
    fit(Logs(), output=tmp_path, log_every_n_steps=2, plugins=[reads])
    assert reads.seen == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ZeroDivisionError("by hand"), "failed"), (KeyboardInterrupt(), "interrupted")],
    ids=["error", "Ctrl-C"],
)
def test_the_summary_of_a_run_that_did_not_finish(tmp_path, error, status):
    class Fails(Logs):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 8:
                raise error

    with pytest.raises(type(error)) as raised:
        fit(Fails(), val=loader(), output=tmp_path, max_epochs=2)
    resume = f"Resume: trainer.fit(..., ckpt_path={str(tmp_path / 'last.ckpt')!r})"
    assert getattr(raised.value, "__notes__", []) == ([resume] if status == "interrupted" else [])
    summary = read(tmp_path / "summary.json")
    assert (summary["status"], summary["steps"], summary["epochs"]) == (status, 8, 1)
    assert type(error).__name__ in summary["error"]
    assert set(summary["metrics"]) == {"loss", "hidden", "val_loss"}
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["step"] == 6  # the first epoch's


def test_several_commands_of_one_trainer_share_the_folder(tmp_path):
    net, one = Logs(), trainer(output=tmp_path)
    one.fit(net, loader())
    one.test(net, loader())
    assert [line["stage"] for line in lines(tmp_path / "metrics.jsonl")] == ["train", "test"]
    summary = read(tmp_path / "summary.json")
    assert (summary["status"], summary["command"]) == ("done", "test")
    assert set(summary["metrics"]) == {"loss", "hidden", "test_loss"}


def test_only_rank_0_writes(tmp_path):
    strategy = type(
        "Second", (Pretend,), {"world": gt.World(rank=1, size=2, local_rank=1, local_size=2)}
    )
    fit(strategy=strategy(), devices=2, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_output_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(EvalNet(), val=loader())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    fit(output=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"already contains a run.*Fix: .*ckpt_path='last'"):
        fit(output=tmp_path)
    with pytest.raises(UsageError, match="already contains a run"):
        trainer(output=tmp_path).validate(EvalNet(), loader())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"is a file\. Fix: name a folder"):
        trainer(output=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_files_is_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fit(output=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "plan.json").exists()


# --- two runs -------------------------------------------------------------------------------------


def test_a_folder_that_another_run_uses_is_refused(tmp_path):
    class Meets(EvalNet):
        refused = None

        def on_train_batch_start(self, batch, batch_idx):
            if self.refused is None:
                with pytest.raises(
                    UsageError, match=r"another run uses output=.*Fix: use another folder"
                ) as self.refused:
                    trainer(output=tmp_path).fit(Net(), loader(), ckpt_path="auto")

    net = Meets()
    fit(net, output=tmp_path)
    assert net.refused is not None
    assert read(tmp_path / "summary.json")["steps"] == 6
    trainer(output=tmp_path, max_epochs=2).fit(
        Net(), loader(), ckpt_path="auto"
    )  # the other run has ended


def test_a_session_uses_its_folder_until_it_is_closed(tmp_path):
    session = Session(output=tmp_path)
    session.launch()
    with pytest.raises(UsageError, match="another run uses"):
        fit(output=tmp_path)
    session.close()
    with pytest.raises(UsageError, match="already contains a run"):
        fit(output=tmp_path)


def test_of_two_runs_that_were_checked_in_a_new_folder_one_starts(tmp_path):
    one, two = (trainer(output=tmp_path) for _ in range(2))
    for each in (one, two):
        each.check(Net())
    one.fit(Net(), loader())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="already contains a run"):
        two.fit(Net(), loader())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    one.fit(Net(), loader())  # its own folder


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    class Fails(Net):
        def on_train_start(self):
            raise KeyboardInterrupt("by hand")

    with pytest.raises(KeyboardInterrupt, match="by hand"):
        fit(Fails(), output=tmp_path)
    assert fit(output=tmp_path).global_step  # it left no checkpoint to lose
    with pytest.raises(UsageError, match="already contains a run"):
        fit(output=tmp_path)


def test_a_refused_resume_does_not_open_the_folder_to_another_run(tmp_path):
    fit(output=tmp_path)
    before = (tmp_path / "last.ckpt").read_bytes()
    one = trainer(output=tmp_path)
    with pytest.raises(UsageError, match="nothing left to do"):
        one.fit(Net(), loader(), ckpt_path="last")
    with pytest.raises(UsageError, match="already contains a run"):
        one.fit(Net(), loader())
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError):
        fit(nn.Linear(3, 1), output=tmp_path / "new")
    with pytest.raises(UsageError, match="holds none"):
        trainer(output=tmp_path / "new").fit(Net(), loader(), ckpt_path="last")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        UsageError, match=r"file/run'? cannot be created: Not a directory. Fix: use another folder"
    ):
        fit(output=tmp_path / "file" / "run")


@pytest.mark.skipif(os.name != "posix", reason="fcntl is POSIX's")
def test_a_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch):
    import fcntl

    def no_lock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")  # on NFS without its lock daemon

    monkeypatch.setattr(fcntl, "flock", no_lock)
    fit(output=tmp_path)
    assert read(tmp_path / "summary.json")["status"] == "done"


#: Locks a folder, and prints a line when it has it.
HOLDER = """
import sys, time
from pathlib import Path
from geartrain.builtin.run_folder import _locked
with _locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_the_error_names_the_process_that_uses_a_folder_and_a_killed_one_gives_it_back(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"locked\n"
            with pytest.raises(UsageError, match=rf"process {other.pid} on {socket.gethostname()}"):
                fit(output=tmp_path)
        finally:
            other.kill()
    assert os.listdir(tmp_path) == ["run.lock"]
    fit(output=tmp_path)
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_a_run_has_forked_does_not_keep_the_folder(tmp_path):
    """A DataLoader worker outlives a run that is killed by seconds."""

    def holds_it():
        for descriptor in range(256):
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / "run.lock")):
                    sys.exit(3)

    child = multiprocessing.get_context("fork").Process(target=holds_it)
    with _locked(tmp_path):
        child.start()
        child.join(DEADLINE)
        assert (tmp_path / "run.lock").exists()
    assert child.exitcode == 0
    assert not (tmp_path / "run.lock").exists()


# --- a full disk ----------------------------------------------------------------------------------


def test_a_full_disk_is_the_error_and_leaves_whole_files(tmp_path):
    """The summary cannot be written either, which is a note on the first error."""

    class Fills(Logs):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2:
                limit.enter_context(
                    files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 20)
                )

    with (
        ExitStack() as limit,
        pytest.raises(
            TrainingError, match=r"^disk full: \S+metrics.jsonl could not be written"
        ) as caught,
    ):
        fit(Fills(), output=tmp_path, log_every_n_steps=1)
    assert any("disk full" in note and "summary.json" in note for note in caught.value.__notes__)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert files_of_core(tmp_path) == ["metrics.jsonl", "plan.json"]


def test_a_full_disk_leaves_no_half_summary_and_none_of_an_earlier_run(tmp_path):
    class Fills:
        @hookimpl
        def on_run_start(self, run):
            if run.command == "test":
                limit.enter_context(files_of_at_most(100))

    with ExitStack() as limit:
        net, one = Logs(), trainer(output=tmp_path, plugins=[Fills()])
        one.fit(net, loader())
        with pytest.raises(TrainingError, match="disk full"):
            one.test(net, loader())
    assert not (tmp_path / "summary.json").exists()


class _Ranks:
    """Knows the error better than rank 0; with ``kills``, rank 0 writes no summary."""

    kills = False

    @hookimpl
    def launch(self, worker):
        try:
            return worker(0)
        except BaseException:
            if self.kills:
                (self.folder / "summary.json").unlink()
            raise TrainingError("rank 1 was ended by SIGKILL") from None


@pytest.mark.parametrize("kills", [False, True])
def test_the_summary_names_the_error_that_the_caller_gets(tmp_path, kills):
    class LosesItsPeer(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("Connection closed by peer")

    ranks = _Ranks()
    ranks.folder, ranks.kills = tmp_path / "run", kills
    with pytest.raises(TrainingError, match="SIGKILL"):
        fit(LosesItsPeer(), strategy=ranks, output=tmp_path / "run")
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed"
    assert summary["error"] == "TrainingError: rank 1 was ended by SIGKILL"


def test_the_summary_of_an_earlier_run_stays_if_a_later_one_never_starts(tmp_path):
    one = fit(Net(), output=tmp_path / "run")
    with pytest.raises(UsageError):
        one.fit(Net(), loader(), ckpt_path=tmp_path / "none.ckpt")
    assert read(tmp_path / "run" / "summary.json")["status"] == "done"


def test_a_folder_that_has_become_read_only_is_named(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    one = fit(Net(), output=tmp_path / "run")
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(whole_files, "_File", refuse)
    with pytest.raises(
        TrainingError,
        match=r"run/plan\.json could not be written: Read-only file system\. Fix: use another",
    ):
        one.fit(Net(), loader())


def test_the_summary_of_a_run_whose_plugin_fails_to_end_it(tmp_path):
    class Fails:
        @hookimpl
        def on_exception(self):
            raise RuntimeError("second")

    class Net(Logs):
        def on_train_end(self):
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        fit(Net(), output=tmp_path, plugins=[Fails()])
    assert read(tmp_path / "summary.json")["error"] == "ValueError: first"


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained module and its checkpoint."""
    folder, net = tmp_path_factory.mktemp("trained"), EvalNet()
    fit(net, output=folder, max_epochs=2)
    return net, folder / "last.ckpt"


def test_fit_starts_from_a_checkpoint(trained):
    net, path = trained
    expected, other = by_hand(net, loader()), EvalNet()
    assert differ(net, other)
    one = trainer()
    one.fit(other, loader(), checkpoint=path)
    assert_equal(other, expected)
    assert (one.global_step, one.current_epoch) == (6, 1)  # counters start from 0


def test_the_modules_own_state_goes_through_a_checkpoint(tmp_path):
    class Own(EvalNet):
        found = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"tensor": torch.arange(3), "epoch": self.current_epoch}

        def on_load_checkpoint(self, checkpoint):
            self.found = checkpoint["mine"]

    fit(Own(), output=tmp_path, max_epochs=2)
    other = Own()
    trainer().test(other, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert other.found["tensor"].tolist() == [0, 1, 2]
    assert other.found["epoch"] == 1


def test_on_checkpoint_saved_finds_a_whole_file(tmp_path):
    class Saved:
        steps = ()

        @hookimpl
        def on_checkpoint_saved(self, run, path):
            assert path == tmp_path / "last.ckpt"
            state = torch.load(path, weights_only=True)
            assert_equal(state["model"], run.module)
            self.steps = (*self.steps, state["step"])

    saved = Saved()
    fit(output=tmp_path, plugins=[saved], max_epochs=2)
    assert saved.steps == (6, 12)


def test_a_checkpoint_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, match=r"no checkpoint.*none\.ckpt"):
        trainer().fit(EvalNet(), loader(), checkpoint=tmp_path / "none.ckpt")


class Code:
    """An object as in a malicious file: unpickling it runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    "state",
    [
        [1, 2],
        {"state_dict": Net().state_dict()},
        {"model": 3},
        {"model": {**Net().state_dict(), "layers.0.bias": torch.ones(7)}},
        {"model": {**Net().state_dict(), "more": torch.ones(7)}},
    ],
    ids=["list", "Lightning's", "number as model", "other shape", "more weights"],
)
def test_a_checkpoint_that_does_not_fit_or_is_none(state, tmp_path):
    torch.save(state, tmp_path / "some.ckpt")
    with pytest.raises(TrainingError, match=r"some\.ckpt"):
        trainer().fit(EvalNet(), loader(), checkpoint=tmp_path / "some.ckpt")


def test_a_checkpoint_of_another_model_names_both_and_changes_nothing(tmp_path):
    path, net = tmp_path / "other.ckpt", EvalNet()
    torch.save({"model": torch.nn.Linear(3, 1).state_dict()}, path)
    before = weights(net)
    with pytest.raises(
        TrainingError, match=r"(?s)other\.ckpt does not fit EvalNet.*layers\.0\.weight"
    ):
        trainer().test(net, loader(), ckpt_path=path)
    assert_equal(net, before)


@pytest.mark.parametrize(
    "save",
    [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))],
    ids=["torch", "pickle"],
)
def test_code_in_a_checkpoint_is_never_run(save, tmp_path):
    path, harm = tmp_path / "bad.ckpt", tmp_path / "harm"
    save({"model": Net().state_dict(), "more": Code(harm)}, path)
    with pytest.raises(TrainingError, match=r"bad\.ckpt"):
        trainer().fit(Net(), loader(), checkpoint=path)
    assert not harm.exists()


def test_a_save_that_fails_leaves_the_last_checkpoint_and_no_other_file(tmp_path, monkeypatch):
    save, calls = torch.save, []

    def half(state, path, *args, **options):
        calls.append(path)
        save(state, path, *args, **options)
        if len(calls) == 2:
            raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(TrainingError, match=r"last\.ckpt could not be written: disk full"):
        fit(output=tmp_path, max_epochs=2)
    files = ["last.ckpt", "metrics.jsonl", "plan.json", "summary.json"]
    assert files_of_core(tmp_path) == files
    # The first epoch's, whole.
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["step"] == 6
    assert read(tmp_path / "summary.json")["status"] == "failed"


def test_metrics_that_are_no_numbers_can_be_read_back(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    def log(module, batch, batch_idx):
        module.log_dict({"nan": float("nan"), "inf": float("inf")})

    fit(Logging(log), output=tmp_path)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {"nan", "inf"} <= json.loads(line, parse_constant=refuse).keys()


def test_a_plugin_may_replace_how_checkpoints_are_written_and_read(tmp_path):
    class Memory:
        replaces = frozenset({"save_checkpoint", "load_checkpoint"})

        def __init__(self):
            self.states = {}

        @hookimpl
        def save_checkpoint(self, state, path):
            path.write_text("elsewhere")
            self.states[path] = {
                "model": {name: tensor.clone() for name, tensor in state["model"].items()}
            }

        @hookimpl
        def load_checkpoint(self, path):
            return self.states[path]

    memory, net, other = Memory(), EvalNet(), EvalNet()
    fit(net, output=tmp_path, plugins=[memory])
    trainer(plugins=[memory]).test(other, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert_equal(net, other)
    with pytest.raises(GeartrainError, match="could not be read"):
        trainer().test(other, loader(), ckpt_path=tmp_path / "last.ckpt")
