"""Kill or hang processes of the strategy elastic at random moments; its run ends as a quiet one.

The cases are those of kill_and_resume.py, and modules with objects that no checkpoint has, some of
which a callback shares, and loggers. One or two processes are killed, are stopped (SIGSTOP), wait
without end or raise an error, one after the other or at once, also while others start again. The
run must end by itself, equal bit for bit: weights, optimizers, metrics, the lines of metrics.jsonl
and of CSV files, the points of TensorBoard, and the files.

Run it by hand; pytest does not collect it::

    python tests/drills/elastic_kills.py --cases 100 --kills 2 --seed 0
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kill_and_resume import NEVER, Net, differences, draw, forked, kill_of, program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from geartrain.callbacks import Callback
from geartrain.loggers import CSVLogger
from geartrain_elastic import starter
from geartrain_tensorboard import TensorBoard

#: Seconds after which a process that is stopped is killed.
STOPPED = 2.0
#: The ways in which processes fail; the others take seconds.
WAYS = ["kill", "kill", "kill", "error", "error", "stop", "hang"]


@dataclass(slots=True)
class Meter:
    """An object of the user's, without ``__dict__``."""

    total: float = 0.0


class Objects(Net):
    """Has state that no checkpoint has. Gradients and logged values depend on it."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("replaced", torch.zeros(1))
        self.losses: list[float] = []
        self.table, self.array = torch.zeros(4), np.zeros(2)
        self.first, self.parts, self.memory = self.table[:2], [self.scale], self.array[1:]
        self.mean, self.last = torch.zeros(1), deque(maxlen=3)
        self.meters, self.hidden, self.draws = [Meter()], [nn.Linear(1, 1)], random.Random(3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.parts[0] += 0.125
        self.losses.append(float(loss.detach()))
        self.first += self.draws.random()
        self.memory += 1
        self.mean.data.lerp_(loss.detach(), 0.5)
        self.mean.numpy()[0] += 1
        self.replaced = self.replaced + 1
        self.last.append(self.mean)
        self.meters[0].total += float(loss.detach())
        self.hidden[0].weight.data.add_(1)
        if len(self.losses) == 3:
            self.meters.append(self.meters[0])
            self.late = self.late_too = [0.0]
        if len(self.losses) > 3:
            self.late[0] += self.meters[1].total
            self.log("late", float(self.late_too[0]), on_step=True, sync_dist=True)
        values = (self.table, self.array, self.mean, self.hidden[0].weight)
        self.log("objects", sum(float(each.sum()) for each in values), on_step=True, sync_dist=True)
        return loss * self.scale * (1 + self.draws.random())


class Watch(Callback):
    """Takes a list of the module."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.losses = pl_module.losses

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("watched", sum(self.losses), on_step=True, sync_dist=True)


def train(case: dict[str, Any], folder: Path, kills: list[dict[str, Any]]) -> None:
    loggers = {
        "csv": CSVLogger(),
        "csv elsewhere": CSVLogger(str(folder / "elsewhere.csv")),
        "tensorboard": TensorBoard(),
    }
    more = [loggers[name] for name in case["loggers"]]
    if case["objects"]:
        return program(case, str(folder), kills, Objects, [*more, Watch()])
    return program(case, str(folder), kills, more=more)


def case_of(seed: int, number: int, timeout: float) -> dict[str, Any]:
    """Return a case: the same for the same numbers."""
    choose = random.Random(f"{seed} {number} elastic")
    case = draw(seed, number, "elastic")
    case["ranks"] = choose.choice([2, 2, 3, 4])
    case["virtual_ranks"] = min(4, case["ranks"] + choose.choice([0, 0, 1]))
    if case["virtual_ranks"] == 4:  # no batch of one sample
        case["samples"] = 32
    case["replace"] = choose.random() < 0.75
    case["timeout"] = timeout
    case["asynchronous"] = False  # refused
    case["objects"] = choose.random() < 0.7
    if case["objects"] and choose.random() < 0.5:
        case["average"] = "ema"
    loggers = ["csv", "csv elsewhere", "tensorboard"]
    case["loggers"] = [name for name in loggers if choose.random() < 0.5]
    return case


def kills_of(case: dict[str, Any], whole: Path, folder: Path) -> list[dict[str, Any]]:
    """Return random deaths of the whole run that leave a process; the same for the same folder."""
    choose = random.Random(f"{json.dumps(case)} {folder.name} kills")
    ranks = {**case, "ranks": case["virtual_ranks"]}
    most = 2 if case["replace"] or case["ranks"] > 2 else 1
    kills = [
        {
            **kill_of(choose, ranks, whole),
            "all": False,
            "done": f"{folder}.{number}",
            "way": choose.choice(WAYS),
        }
        for number in range(choose.randint(1, most))
    ]
    if [kill["way"] for kill in kills] == ["hang"] * case["ranks"]:  # nobody waits for them
        kills[0]["way"] = "stop"
    return kills


def run_all(case: dict[str, Any], whole: Path, folders: list[Path]) -> None:
    """Run a case, and again with kills in each folder; torch is imported once for all ranks."""
    whole.mkdir()
    train(case, whole, [NEVER])
    for folder in folders:
        folder.mkdir()
        try:
            train(case, folder, kills_of(case, whole, folder))
        except Exception:
            traceback.print_exc()
            Path(f"{folder}.failed").touch()


def points(folder: Path) -> dict[str, Any]:
    """Return the scalars of TensorBoard by folder and name."""
    found = {}
    for path in {file.parent for file in folder.rglob("*tfevents*")}:
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars = [(event.step, event.value) for event in events.Scalars(tag)]
            found[f"{path.name} {tag}"] = scalars
    return found


def problems(whole: Path, folder: Path, kills: list[Any]) -> list[str]:
    """Return what is wrong with a run."""
    wrong = [] if not Path(f"{folder}.failed").exists() else ["it failed"]
    wrong += differences(whole, folder)
    for name in ("run/metrics.jsonl", "run/metrics.csv", "elsewhere.csv"):
        paths = [each / name for each in (whole, folder)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        if texts[0] != texts[1]:
            wrong.append(f"{name} has other lines")
    if points(whole) != points(folder):
        wrong.append("TensorBoard has other points")
    if not any(Path(kill["done"]).exists() for kill in kills):
        wrong.append("nothing was killed")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--kills", type=int, default=2, help="runs of each case with kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="the number of one case")
    parser.add_argument(
        "--timeout", type=float, default=15.0, help="for hangs; some start for 10 s"
    )
    parser.add_argument("--fork", action="store_true", help="processes are forks: less CPU time")
    parser.add_argument("--keep", help="keep the runs in this folder")
    given = parser.parse_args()
    numbers = range(given.first, given.cases) if given.only is None else [given.only]
    counts: Counter[str] = Counter()
    torch.set_num_threads(1)
    if given.fork:
        starter.start_context = partial(multiprocessing.get_context, "fork")
    os.environ["GEARTRAIN_PATIENCE"] = f"stopped={STOPPED}"
    for name in ("torchmetrics", "torch._dynamo"):  # imported here, so that forks have them
        importlib.import_module(name)
    temporary = tempfile.mkdtemp(prefix="geartrain-drill-")
    try:
        for number in numbers:
            case = case_of(given.seed, number, given.timeout)
            whole = Path(given.keep or temporary, str(number))
            whole.parent.mkdir(parents=True, exist_ok=True)
            folders = [whole.with_name(f"{number}-{i}") for i in range(given.kills)]
            code, out = forked(
                whole, [], partial(run_all, case, whole, folders), 120 * (1 + given.kills)
            )
            if code:
                refused = "UsageError" in out
                counts["refused" if refused else "wrong"] += 1
                verdict = "refused" if refused else "WRONG: failed"
                print(f"{number} {verdict}: {out[-900:]} {json.dumps(case)}", flush=True)
                continue
            left = re.findall("A PROCESS WAS LEFT", out)
            for folder in folders:
                kills = kills_of(case, whole, folder)
                wrong = [*problems(whole, folder, kills), *left]
                killed = sum(Path(kill["done"]).exists() for kill in kills)
                counts["kills"] += killed
                counts["wrong" if wrong else "equal"] += 1
                verdict = "equal"
                if wrong:
                    verdict = f"WRONG: {'; '.join(wrong)} {json.dumps(case)} {out[-2500:]}"
                places = [(kill["rank"], kill["at"], kill["way"]) for kill in kills]
                print(f"{number} {places} killed {killed} {verdict}", flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(temporary)
    print(dict(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        program(json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
