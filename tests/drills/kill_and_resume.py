"""Kill random fits at random moments, resume them with "auto", and compare them with whole ones.

A case is a random combination of strategy, loaders, callbacks and options. A moment is a step, a
write, a sync, a rename or a deletion; SIGKILL ends one rank or all processes there. A resumed fit
must end equal bit for bit: weights, optimizers, metrics, the lines of metrics.jsonl, and the files.

Run it by hand; pytest does not collect it::

    python tests/drills/kill_and_resume.py --cases 100 --kills 2 --seed 0
    python tests/drills/kill_and_resume.py --seed 0 --only 17 --show
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import geartrain as gt
from geartrain.callbacks import (
    EMA,
    AsyncCheckpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from geartrain.files import atomic

#: Values of a case by factor. Values that are named more often are drawn more often.
FACTORS: dict[str, list[Any]] = {
    "strategy": ["single", "single", "single", "ddp", "ddp_spawn", "bagua"],
    "algorithm": ["gradient_allreduce", "bytegrad", "decentralized", "qadam"],
    "ranks": [2, 2, 3],
    "data": ["map", "map", "iterable", "generator"],
    "samples": [24, 30],
    "noise": [False, True],
    "workers": [0, 0, 1, 2],
    "persistent": [False, True],
    "shuffle": [False, True],
    "accumulate": [1, 1, 3, "scheduler"],
    "metrics": ["numbers", "objects", "objects"],
    "checkpoint": ["none", "best", "steps", "newest", "link", "validated"],
    "average": ["none", "none", "ema", "swa"],
    "stopping": [False, False, True],
    "schedule": ["none", "step", "epoch", "plateau"],
    "validation": ["epoch", "epoch", "inside", "none"],
    "every": [1, 2, 50],
    "end": ["epochs", "epochs", "steps"],
    "sanity": [0, 2],
    "asynchronous": [False, False, True],
}
EPOCHS, STEPS, BATCH = 3, 14, 4


def draw(seed: int, number: int, strategy: str | None = None) -> dict[str, Any]:
    """Return a random case, which is the same for the same arguments."""
    choose = random.Random(f"{seed} {number}")
    case = {name: choose.choice(values) for name, values in FACTORS.items()}
    case["strategy"] = strategy or case["strategy"]
    if case["strategy"] == "single":
        case["ranks"] = 1
    if case["data"] != "map":  # a stream cannot be shuffled; 24 leaves no batch of one sample
        case["shuffle"], case["samples"] = False, 24
    if case["data"] == "iterable" and case["persistent"] and case["workers"]:
        case["noise"] = False  # a resume cannot restore the random state of such workers, and warns
    return case


# --- the program ----------------------------------------------------------------------------------


def sample(number: int, noise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, generator=torch.Generator().manual_seed(number))
    return x + 0.1 * torch.rand(6) * noise, x.sum().sin().reshape(1)


class Samples(Dataset):
    def __init__(self, count: int, noise: bool = False) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(index, self.noise)


class Stream(IterableDataset):
    """Every rank and every worker yields its part."""

    def __init__(self, count: int, noise: bool, rank: int, ranks: int) -> None:
        self.count, self.noise, self.rank, self.ranks = count, noise, rank, ranks

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        mine = range(self.rank, self.count, self.ranks)
        part = mine if worker is None else mine[worker.id :: worker.num_workers]
        yield from (sample(number, self.noise) for number in part)


class Batches:
    """A loader of the user's own, whose iterator is a generator."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(self.stream, BATCH)


class Net(gt.Module):
    #: The kills; no hyperparameter, because the files before must be those of the whole run.
    kills: list[dict[str, Any]]

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)
        )
        self.case = case
        if case["metrics"] == "objects":
            import torchmetrics  # takes seconds

            self.error = torchmetrics.MeanSquaredError()
            self.val_error = torchmetrics.MeanAbsoluteError()
            self.total = torchmetrics.MetricCollection([torchmetrics.MaxMetric()])

    def setup(self, stage: str) -> None:
        self.moments = Moments(self.kills, self.global_rank)

    def train_dataloader(self) -> Any:
        case = self.case
        workers = {"num_workers": case["workers"]}
        workers["persistent_workers"] = case["persistent"] and case["workers"] > 0
        if case["data"] == "map":
            data = Samples(case["samples"], case["noise"])
            return DataLoader(data, BATCH, shuffle=case["shuffle"], **workers)
        stream = Stream(case["samples"], case["noise"], self.global_rank, self.trainer.world_size)
        return Batches(stream) if case["data"] == "generator" else DataLoader(stream, 2, **workers)

    def val_dataloader(self) -> Any:
        return None if self.case["validation"] == "none" else DataLoader(Samples(7), 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.moments.count()
        x, y = batch
        found = self.layers(x)
        loss = nn.functional.mse_loss(found, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if self.case["metrics"] == "objects":
            self.error(found.detach(), y)
            self.log("error", self.error, on_step=True, on_epoch=True)
            self.total(loss.detach())
            self.log_dict(self.total, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.moments.count()
        x, y = batch
        found = self.layers(x)
        self.log("val_loss", nn.functional.mse_loss(found, y), sync_dist=True)
        if self.case["metrics"] == "objects":
            self.val_error(found, y)
            self.log("val_error", self.val_error)

    def configure_optimizers(self) -> Any:
        if (self.case["strategy"], self.case["algorithm"]) == ("bagua", "qadam"):
            from geartrain_bagua import QAdamOptimizer

            return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=4)
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        kind = self.case["schedule"]
        if kind == "none":
            return optimizer
        if kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            monitored = {"scheduler": scheduler, "monitor": "loss", "interval": "epoch"}
            return {"optimizer": optimizer, "lr_scheduler": monitored}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": kind}]


class Moments:
    """Count this rank's steps and its operations on files, and kill at the one that is asked for.

    Args:
        kills: each with ``at``: the number of the moment, 0: never; ``rank``; ``all``: kill all
            processes; ``done``: a file, if a rank that starts again must not be killed again;
            ``way``: ``"kill"``, ``"stop"`` (SIGSTOP), ``"hang"`` (an endless wait in Python), or
            ``"error"``, in a step.
    """

    def __init__(self, kills: list[dict[str, Any]], rank: int) -> None:
        self.kills, self.rank, self.done = kills, rank, 0
        write = atomic._File.write

        def half(file: Any, data: Any) -> None:
            write(file, bytes(data)[: len(data) // 2])

        atomic._File.write = self.counted(write, half)  # type: ignore[method-assign]
        os.fsync, os.replace = self.counted(os.fsync), self.counted(os.replace)
        os.unlink = self.counted(os.unlink)

    def counted(self, action: Callable[..., Any], half: Any = None) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            self.count(lambda: half and half(*args))
            return action(*args, **options)

        return act

    def count(self, before: Callable[[], Any] | None = None) -> None:
        self.done += 1
        for kill in self.kills:
            if self.done == kill["at"] and self.rank == kill["rank"]:
                if "done" in kill:
                    if os.path.exists(kill["done"]):
                        continue
                    os.close(os.open(kill["done"], os.O_CREAT))
                way = kill.get("way", "kill")
                if before is not None:
                    before()
                elif way == "error":  # in a logger's operation on a file it would be a warning
                    raise OSError("the network was away")
                if kill["all"]:
                    os.killpg(int(os.environ["DRILL_GROUP"]), signal.SIGKILL)
                if way == "hang":
                    threading.Event().wait()
                os.kill(os.getpid(), signal.SIGSTOP if way == "stop" else signal.SIGKILL)

    def __reduce__(self) -> Any:
        return int, (0,)  # ddp_spawn returns the module to its caller


class Ends:
    """Save each rank's results."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @gt.hookimpl
    def on_run_end(self, run: gt.Run) -> None:
        rank = run.world.rank
        torch.save(
            {
                "moments": run.module.moments.done,
                "weights": run.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
                "schedulers": [one.scheduler.state_dict() for one in run.schedulers],
                "metrics": dict(run.metrics) if rank == 0 else {},
                "counters": [run.step, run.epoch, run.loop.batches_seen],
                "random": torch.get_rng_state(),
            },
            Path(self.folder, f"rank-{rank}.pt"),
        )


def callbacks_of(case: dict[str, Any]) -> list[Any]:
    monitor = "loss_epoch" if case["validation"] == "none" else "val_loss"
    checkpoints = {
        "best": {
            "monitor": monitor,
            "save_top_k": 2,
            "save_last": True,
            "filename": "best-{epoch}",
        },
        "steps": {"every_n_train_steps": 3, "filename": "step-{step}"},
        "newest": {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2},
        "link": {"monitor": monitor, "save_last": "link"},
        "validated": {"save_on_train_epoch_end": False, "save_top_k": -1},
    }
    found: list[Any] = [AsyncCheckpoint()] if case["asynchronous"] else []
    if case["checkpoint"] in checkpoints:
        found.append(ModelCheckpoint(**checkpoints[case["checkpoint"]]))
    if case["stopping"]:
        found.append(EarlyStopping(monitor, patience=1, min_delta=0.2))
    if case["average"] == "ema":
        found.append(EMA(decay=0.8))
    if case["average"] == "swa":
        found.append(StochasticWeightAveraging(0.05, 2))
    if case["accumulate"] == "scheduler":
        found.append(GradientAccumulationScheduler({0: 2, 1: 3, 2: 1}))
    return found


def program(
    case: dict[str, Any],
    folder: str,
    kills: list[dict[str, Any]],
    kind: type[Net] = Net,
    more: Sequence[Any] = (),
) -> None:
    """Train a module of this kind, with more plugins than those of the case."""
    torch.set_num_threads(1)
    os.environ.setdefault("DRILL_GROUP", str(os.getpgid(0)))
    # With three ranks the order of additions depends on the buckets, which torch's DDP orders anew
    # after its first step, unless it looks for unused parameters.
    options = {"find_unused_parameters": True} if case["ranks"] == 3 else None
    if case["strategy"] in ("bagua", "elastic"):
        names = {"bagua": ["algorithm"], "elastic": ["virtual_ranks", "replace", "timeout"]}
        options = {name: case[name] for name in names[case["strategy"]]}
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=case["strategy"],
        strategy_options=options,
        devices=case["ranks"],
        max_epochs=EPOCHS if case["end"] == "epochs" else -1,
        max_steps=-1 if case["end"] == "epochs" else STEPS,
        accumulate_grad_batches=1 if case["accumulate"] == "scheduler" else case["accumulate"],
        val_check_interval=2 if case["validation"] == "inside" else 1.0,
        log_every_n_steps=case["every"],
        num_sanity_val_steps=case["sanity"],
        enable_progress_bar=False,
        output=Path(folder, "run"),
        plugins=[*callbacks_of(case), *more, Ends(folder)],
        seed=1,
    )
    module = kind(case)
    module.kills = kills
    trainer.fit(module, ckpt_path="auto")


# --- the drill ------------------------------------------------------------------------------------


def start(
    case: dict[str, Any], folder: Path, kills: list[dict[str, Any]]
) -> tuple[int | None, str]:
    """Run the program; return its exit code and its output, with a note if it left a process."""
    folder.mkdir(exist_ok=True)
    arguments = ["program", json.dumps(case), str(folder), json.dumps(kills)]
    return forked(folder, arguments, lambda: program(case, str(folder), kills), 180)


def forked(
    folder: Path, arguments: list[str], function: Callable[[], Any], seconds: float
) -> tuple[int | None, str]:
    """Call a function in a fork of this process, which has imported torch.

    Args:
        folder: the output goes beside it.
        arguments: of the command that the fork says it is; ranks are started with it.
        seconds: after which the fork is killed.

    Returns:
        The exit code, or ``None`` if it was killed; and the output, with a note if it left a
        process.
    """
    out = folder.with_name(f"{folder.name}.out")
    pid = os.fork()
    if pid == 0:
        with out.open("w") as file:
            os.setsid()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv[1:] = arguments
        sys.orig_argv[:] = [sys.executable, __file__, *arguments]
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
    status, notes = wait(pid, seconds), ""
    with suppress(ProcessLookupError):
        for _ in range(100):  # ranks that end with the killed one
            os.killpg(pid, 0)
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)
        notes = "A PROCESS WAS LEFT"
    return status, f"{out.read_text()}{'TIMEOUT' if status is None else ''}{notes}"


def wait(pid: int, seconds: float) -> int | None:
    """Return a child's exit code; ``None``, after a kill of its group, if that takes too long."""
    handle = os.pidfd_open(pid)
    in_time = bool(select.select([handle], [], [], seconds)[0])
    os.close(handle)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if in_time else None


NEVER = {"at": 0, "rank": 0, "all": False}


def values(state: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a nested state by path, without what differs between any two runs."""
    if isinstance(state, dict):
        items = [(key, item) for key, item in state.items() if key not in UNCOMPARED]
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    else:
        return {path: state}
    return {k: v for key, item in items for k, v in values(item, f"{path}.{key}").items()}


#: Random ids, paths, files that are no longer there, and the number of moments. torch adds
#: ``differentiable`` to an optimizer's defaults at a load, and so to its later groups.
UNCOMPARED = ("identity", "output", "replaced", "moments", "differentiable")


def lines(folder: Path) -> dict[str, Any]:
    """Return the logged values by step, stage and name; a resumed run logs some steps again."""
    path = folder / "run" / "metrics.jsonl"
    found = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {
        f"{line['stage']} {line['step']} {line['epoch']} {name}": value
        for line in found
        for name, value in line.items()
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return isinstance(y, torch.Tensor) and torch.equal(x, y)
        return bool(x == y or (x != x and y != y))

    return [key for key in {**a, **b} if key not in a or key not in b or not equal(a[key], b[key])]


def of_lost_file(folder: Path, key: str) -> bool:
    """True for the score of a file that is no longer there: a killed run may have replaced it."""
    name = key.rpartition(".best_k_models.")[2]
    return name != key and not (folder / "run" / "checkpoints" / name).exists()


def differences(whole: Path, other: Path) -> list[str]:
    """Return the differences between two folders of results and runs, in words."""
    found = []
    names = [
        sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file())
        for one in (whole, other)
    ]
    # Logs of ranks are named alike, and a killed run may leave the error of a rank. Those of
    # TensorBoard are named after the time and the process.
    first, second = (
        {name for name in one if "logs/" not in name and "tfevents" not in name} for one in names
    )
    if first != second:
        found.append(f"files: {sorted(first ^ second)}")
    for name in sorted(first & second):
        if name.endswith((".ckpt", ".pt")):
            states = [values(torch.load(one / name, weights_only=True)) for one in (whole, other)]
            if keys := [key for key in differing(*states) if not of_lost_file(whole, key)]:
                found.append(f"{name}: {len(keys)} values, {keys[:4]}")
    if keys := differing(lines(whole), lines(other)):
        found.append(f"metrics.jsonl: {len(keys)} values, {keys[:4]}")
    return found


def kill_of(choose: random.Random, case: dict[str, Any], whole: Path) -> dict[str, Any]:
    """Return a random rank and moment of the whole run."""
    rank = choose.randrange(case["ranks"])
    moments = torch.load(whole / f"rank-{rank}.pt", weights_only=True)["moments"]
    return {"at": choose.randint(1, moments), "rank": rank, "all": choose.random() < 0.5}


def outcome(case: dict[str, Any], whole: Path, folder: Path, kill: dict[str, Any]) -> list[str]:
    """Kill, resume and compare; return what is wrong."""
    code, out = start(case, folder, [kill])
    if code == 0:
        return [f"the kill did not end the run: {out[-400:]}"]
    code, more = start(case, folder, [NEVER])
    wrong = differences(whole, folder) if code == 0 else [f"exit code {code}: {more[-1500:]}"]
    return [*wrong, *re.findall("A PROCESS WAS LEFT|TIMEOUT", out + more)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--kills", type=int, default=2, help="kills of each case, one run each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--strategy", help="of all cases")
    parser.add_argument("--only", type=int, default=None, help="the number of one case")
    parser.add_argument("--keep", help="keep the runs in this folder")
    given = parser.parse_args()
    numbers = range(given.first, given.cases) if given.only is None else [given.only]
    counts: Counter[str] = Counter()
    torch.set_num_threads(1)
    for name in ("torchmetrics", "torch._dynamo"):  # imported here, so that forks have them
        importlib.import_module(name)

    # Not a TemporaryDirectory, which a fork would remove at its end.
    temporary = tempfile.mkdtemp(prefix="geartrain-drill-")
    try:
        for number in numbers:
            case = draw(given.seed, number, given.strategy)
            choose = random.Random(f"{given.seed} {number} kills")
            whole = Path(given.keep or temporary, str(number))
            whole.parent.mkdir(parents=True, exist_ok=True)
            code, out = start(case, whole, [NEVER])
            if code:
                refused = "UsageError" in out or "Fix:" in out
                counts["refused" if refused else "wrong"] += 1
                message = " | ".join(line for line in out.splitlines() if line.strip())
                verdict = "refused" if refused else "WRONG: failed"
                print(f"{number} {verdict}: {message[-900:]} {json.dumps(case)}", flush=True)
                continue
            for repeat in range(given.kills):
                kill, folder = kill_of(choose, case, whole), whole.with_name(f"{number}-{repeat}")
                wrong = outcome(case, whole, folder, kill)
                counts["wrong" if wrong else "equal"] += 1
                verdict = f"WRONG: {'; '.join(wrong)} {json.dumps(case)}" if wrong else "equal"
                print(f"{number} {json.dumps(kill)} {verdict}", flush=True)
    finally:
        shutil.rmtree(temporary)
    print(dict(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        program(json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
