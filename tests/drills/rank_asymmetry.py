"""Things that happen on one rank only, under every strategy with several ranks: print a table.

A cell is an event, a strategy and the rank of the event. Its run must give the result of one
process, or end within 15 seconds with an error that has the rank. Examples::

    python tests/drills/rank_asymmetry.py
    python tests/drills/rank_asymmetry.py --strategies fsdp,elastic --events barrier,save
    python tests/drills/rank_asymmetry.py --cell "barrier fsdp 1" --show
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from several_ranks import program, run

import geartrain as gt

#: Seconds from an event to the end of its run, and for a cell with the start of its ranks.
LIMIT, SECONDS = 15.0, 60
APART = "the ranks are in different collectives: "
#: Event -> the error, in which ``{one}`` is the rank of the event; ``None`` for the result of one
#: process; "" for either, or any error with the rank.
EVENTS: dict[str, str | None] = {
    "import": None,
    "warning": None,
    "file": None,
    "environment": None,
    "slow": None,
    "log": None,
    "nan": None,
    "empty": "the training loaders of ranks [{one}] gave no batch, and the others' did",
    "uneven": "",
    "weight": "rank 1 differs from rank 0: the weight first.weight",
    "all of a weight": "rank 1 differs from rank 0: the weight first.weight",
    "rate": "rank 1 differs from rank 0: lr of group 0 of optimizer 0 (SGD) is ",
    "freeze": "rank 1 differs from rank 0: requires_grad of first.bias is ",
    "error": "OwnError: the user's own error",
    "log with sync_dist": "ranks 0 and 1 logged different metrics with sync_dist: 'mine'",
    "unused": "rank {one} did not use these parameters in a step: last.weight, last.bias. "
    "Fix: --strategy.find_unused_parameters true",
    "leaf": "rank {one} did not use these parameters in a step: first.weight, first.bias, ",
    "all_gather": APART,
    "all_gather at the end": APART,
    "barrier": APART,
    "broadcast": APART,
    "save": APART,
    "killed": "",
}
#: Errors of strategies that differ.
ERRORS: dict[str, dict[str, str | None]] = {
    # The gradients of the rank are zeros; a rank that died is replaced.
    "elastic": {"unused": "", "leaf": "", "killed": None},
    # The loss without the last layer is in parts on all ranks.
    "tensor_parallel": {"unused": "self.log('loss'): ranks have parts of this tensor"},
}
#: Strategies whose ranks are the devices of one process, whose starter is no rank, or of which a
#: rank has a part of the model.
ONE_PROCESS = ("single", "dp", "ddp2")
WITH_STARTER = ("ddp_spawn", "elastic")
SHARDED = ("fsdp", "ddp_sharded", "tensor_parallel", "deepspeed")
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp_spawn": {"start_method": "fork"},
    "fsdp": {"units": "Linear"},
    "horovod": {"scale_lr": False},
    "tensor_parallel": {"colwise": "first", "rowwise": "last"},
}
#: Events whose handling differs between rank 0 and the other ranks.
OF_RANK_0 = ("error", "broadcast", "save", "killed")
#: Strategy -> the package that it needs beside its distribution.
NEEDS = {"horovod": "horovod", "deepspeed": "deepspeed"}


def strategies() -> list[str]:
    """Return the strategies with several processes; one name of each class."""
    found: dict[str, str] = {}
    for entry in sorted(entry_points(group="geartrain.strategies")):
        if entry.name not in ONE_PROCESS:
            found.setdefault(entry.value, entry.name)
    return sorted(found.values())


@dataclass(frozen=True)
class Cell:
    event: str
    strategy: str
    #: The rank of the event.
    one: int

    def __str__(self) -> str:
        return f"{self.event} {self.strategy} {self.one}"

    @classmethod
    def read(cls, text: str) -> Cell:
        event, strategy, one = text.rsplit(" ", 2)
        return cls(event, strategy, int(one))

    @property
    def expected(self) -> str | None:
        """See ``EVENTS``."""
        if self.event in ERRORS.get(self.strategy, {}):
            return ERRORS[self.strategy][self.event]
        expected = EVENTS[self.event]
        if expected == APART and self.strategy == "elastic":
            return "processes would deadlock"
        # Steps and collectives of these are their own, and so are their errors.
        return "" if expected and self.strategy in SHARDED else expected


def cells() -> list[Cell]:
    return [Cell(event, name, one) for event in EVENTS for name in strategies() for one in (0, 1)]


def few_cells() -> list[Cell]:
    """Return each event under each strategy, on both ranks where that differs and under ddp."""
    places = [(i + j) % 2 for i in range(len(EVENTS)) for j in range(len(strategies()))]
    return [
        cell
        for cell, place in zip(cells(), [place for place in places for _ in (0, 1)], strict=True)
        if cell.one == place or cell.strategy == "ddp" or cell.event in OF_RANK_0
    ]


# --- the program of a cell ------------------------------------------------------------------------


class OwnError(Exception):
    pass


class Numbers(IterableDataset):
    """Eight batches; fewer on the rank of the event."""

    def __init__(self, batch: int, batches: Any) -> None:
        self.batch, self.batches = batch, batches

    def __iter__(self) -> Any:
        yield from torch.ones(self.batch * self.batches(), 4)


class Net(gt.Module):
    def __init__(self, event: str, one: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.event, self.one = event, one

    def is_now(self, event: str, batch_idx: int = 2) -> bool:
        """True at the event of this rank; then its first time is in the file ``event``."""
        now = (event, self.one) == (self.event, self.global_rank) and batch_idx == 2
        if now:
            with suppress(FileExistsError), open("event", "x") as file:
                file.write(str(time.time()))
        return now

    def batches(self) -> int:
        return 0 if self.is_now("empty") else 3 if self.is_now("uneven") else 8

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        strategy, hidden = self.trainer.strategy, self.first(x)
        if self.is_now("import", batch_idx):
            importlib.import_module("torchmetrics")
        if self.is_now("warning", batch_idx):
            warnings.warn("on one rank", stacklevel=1)
        if self.is_now("file", batch_idx):
            Path(f"run/own-{self.one}").write_text("on one rank")
        if self.is_now("environment", batch_idx):
            os.environ["ON_ONE_RANK"] = "1"
        if self.is_now("slow", batch_idx):
            time.sleep(3)  # longer than the first pause of a rank that waits
        if self.is_now("log", batch_idx):
            self.log("mine", 1.0)
        if self.is_now("log with sync_dist", batch_idx):
            self.log("mine", 1.0, sync_dist=True)
        if self.is_now("weight", batch_idx):
            self.first.weight.data[0, 0] += 1e-6
        if self.is_now("rate", batch_idx):
            self.optimizers().param_groups[0]["lr"] = 0.2
        if self.is_now("error", batch_idx):
            raise OwnError("the user's own error")
        if self.is_now("all_gather", batch_idx):
            self.all_gather(x)
        if self.is_now("barrier", batch_idx):
            strategy.barrier()
        if self.is_now("broadcast", batch_idx):
            strategy.broadcast("x")
        if self.is_now("save", batch_idx):
            self.trainer.save_checkpoint("lone.ckpt")
        if not os.path.exists("event") and self.is_now("killed", batch_idx):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_now("leaf", batch_idx):
            return torch.zeros((), requires_grad=True)
        output = hidden if self.is_now("unused", batch_idx) else self.last(hidden)
        loss = output.square().mean() * (float("nan") if self.is_now("nan", batch_idx) else 1.0)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_start(self) -> None:
        if self.is_now("freeze"):
            self.first.bias.requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_now("all of a weight", batch_idx):
            with torch.no_grad():
                self.first.weight.mul_(1.01)

    def on_train_epoch_end(self) -> None:
        if self.is_now("all_gather at the end"):
            self.all_gather(torch.ones(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: str, event: str, one: int) -> Any:
    """Train on two ranks; return the weights and the number of steps."""
    module = Net(event, one)
    # These ranks see the same batches.
    batch = 4 if strategy == "tensor_parallel" else 2
    timeout = {} if strategy == "horovod" else {"timeout": 50.0}
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        strategy_options={**timeout, **OPTIONS.get(strategy, {})},
        max_epochs=2,
        enable_progress_bar=False,
        log_every_n_steps=1,
        output="run",
    )
    loader = (
        DataLoader(Numbers(batch, module.batches), batch)
        if event in ("empty", "uneven")
        else DataLoader(TensorDataset(torch.ones(32, 4)), batch)
    )
    trainer.fit(module, loader)
    return {name: p.detach() for name, p in module.named_parameters()}, trainer.global_step


# --- its end --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    #: "" if the end is right.
    wrong: str
    #: The end in words.
    outcome: str
    #: From the event to the end.
    seconds: float
    printed: str


def run_cell(cell: Cell, folder: Path) -> Result:
    """Run a cell in an empty folder."""
    arguments, left = (cell.strategy, cell.event, cell.one), list[str]()
    if cell.event == "killed":  # geartrain starts the ranks, and watches them
        with program(folder, train, *arguments) as started:
            code, printed = started.wait(SECONDS), started.out + started.err
            left = [each for each in started.left_behind() if each.startswith("process")]
        files = sorted(folder.glob("rank-*.pt"))
        values = [torch.load(file, weights_only=False) for file in files]
        ends, errors = [str(code)], [printed]
    else:
        by_hand = {"ranks": 1, "place": "alone"} if cell.strategy in WITH_STARTER else {}
        ranks = run(folder, train, *arguments, seconds=SECONDS, **by_hand)
        ends, errors = [rank.end for rank in ranks], [rank.error for rank in ranks]
        values = [rank.result for rank in ranks]
        printed = "\n".join(rank.printed for rank in ranks)
    began = folder / "event"
    seconds = time.time() - float(began.read_text()) if began.exists() else -1.0
    outcome, wrong = judge(cell, ends, errors, values)
    if cell.event == "killed" and left:
        wrong = wrong or f"left {left}"
    if seconds < 0:
        wrong = wrong or "the event did not happen"
    elif seconds > LIMIT and outcome != "result":
        wrong = wrong or f"took {seconds:.0f} s"
    return Result(wrong, outcome, seconds, printed)


def judge(cell: Cell, ends: list[str], errors: list[str], values: list[Any]) -> tuple[str, str]:
    """Return how the cell ended, and the fault in it; an empty string if there is none."""
    expected = cell.expected
    if set(ends) == {"0"}:
        if expected:
            return "result", f"no error, but expected {expected!r}"
        return "result", difference(cell, values)
    if cell.event == "killed" and ends == ["-9"] and cell.one == 0:
        return "the program itself was killed", ""  # rank 0 has started the others
    if set(ends) != {"1"}:
        return f"ended with {ends}", "an end without an error"
    with_rank = re.compile(rf"\branks? \[?(\d+(, | and ))*{cell.one}\b")
    own = errors[0 if len(errors) == 1 else cell.one]
    named = [own] if expected else [text for text in errors if with_rank.search(text)]
    lines = (named or [own])[0].splitlines()
    outcome = next((line for line in lines if with_rank.search(line)), " ".join(lines))
    if expected is None:
        return outcome, "an error, but expected the result of one process"
    if expected:
        return outcome, "" if expected.format(one=cell.one) in own else f"expected {expected!r}"
    if cell.event == "error":
        return outcome, "" if any(OwnError.__name__ in text for text in errors) else "not the error"
    return outcome, "" if named else "an error without the rank"


def difference(cell: Cell, values: list[Any]) -> str:
    """Return the first difference from the result of one process, or ""."""
    whole = values[:1] if cell.strategy in SHARDED else values
    for weights, steps in whole:
        if cell.event in ("uneven", "unused", "leaf"):  # one process has none: ranks are equal
            same, expected = values[0]
        else:
            same, expected = one_process(), 16
        if steps != expected:
            return f"{steps} steps instead of {expected}"
        for name, weight in weights.items():
            right = torch.full_like(weight, torch.nan) if cell.event == "nan" else same[name]
            if not torch.allclose(weight, right, rtol=1e-5, atol=1e-6, equal_nan=True):
                return f"other values of {name}"
    return ""


def one_process() -> dict[str, torch.Tensor]:
    """Return the weights after 16 steps in one process: every sample is the same."""
    module = Net("nothing", 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(16):
        optimizer.zero_grad()
        module.last(module.first(torch.ones(2, 4))).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", help="default: all that can run here")
    parser.add_argument("--events", help="default: all")
    parser.add_argument("--cell", action="append", type=Cell.read, default=[])
    parser.add_argument("--show", action="store_true", help="print the output of wrong cells")
    given = parser.parse_args()
    names = given.strategies.split(",") if given.strategies else strategies()
    events = given.events.split(",") if given.events else list(EVENTS)
    chosen = given.cell or [c for c in cells() if c.strategy in names and c.event in events]
    wrong = 0
    for cell in chosen:
        if find_spec(NEEDS.get(cell.strategy, "torch")) is None:
            continue
        with tempfile.TemporaryDirectory(prefix="cell-") as folder:
            result = run_cell(cell, Path(folder))
        wrong += bool(result.wrong)
        verdict = f"WRONG: {result.wrong}: {result.outcome}" if result.wrong else result.outcome
        print(f"{cell!s:40} {result.seconds:5.1f} s  {verdict[:150]}", flush=True)
        if given.show and result.wrong:
            print(result.printed)
    print(f"\n{len(chosen)} cells, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
