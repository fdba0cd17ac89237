"""Epochs over a table of 20,000 rows through ``DataLoader(TensorDataset)``, loader and steps.

An MLP 64-64-10 with Adam, batches of 256 rows in shuffled order, one thread on one core. The
trainers take turns of an epoch (see turns.py). ``equal`` says whether a trainer ends with the
weights of the loop by hand, bit for bit, and so has seen the same rows in the same order.

    python benchmarks/table.py [--rounds 20] [--rows 20000] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import warnings
from functools import partial
from typing import Any

import torch
from overhead import AGAIN
from torch.utils.data import DataLoader, TensorDataset
from trainers import Work, adam, classes, loss_of, mlp, module_of
from turns import TRUSTED, Turns, alternate, pin, ratios

import geartrain as gt

WORK = Work(mlp, partial(classes, 256, 64), adam)


def loader(rows: int) -> DataLoader[Any]:
    data = TensorDataset(*classes_of(rows))
    order = torch.Generator().manual_seed(2)
    return DataLoader(data, batch_size=256, shuffle=True, generator=order)


def classes_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return classes(rows, 64)


def by_hand(turns: Turns, rows: int) -> torch.nn.Module:
    batches, net = loader(rows), WORK.new_net()
    optimizer = adam(net.parameters())
    for _ in range(turns.turns):
        turns.wait()
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            optimizer.step()
    turns.stop()
    return net


def by_geartrain(turns: Turns, rows: int, plugins: tuple[str, ...] = ()) -> torch.nn.Module:
    class Epochs:
        @gt.hookimpl
        def on_epoch_start(self):
            turns.wait()

        @gt.hookimpl
        def on_train_end(self):
            turns.stop()

    module = module_of(gt.Module, WORK)()
    gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=turns.turns,
        enable_progress_bar=False,
        plugins=[Epochs(), *plugins],
    ).fit(module, loader(rows))
    return module.net


def by_lightning(turns: Turns, rows: int) -> torch.nn.Module:
    import pytorch_lightning as pl

    class Module(module_of(pl.LightningModule, WORK)):
        def on_train_epoch_start(self):
            turns.wait()

        def on_train_end(self):
            turns.stop()

    module = Module()
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=turns.turns,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader(rows))
    return module.net


LOOPS = {
    "by hand": by_hand,
    AGAIN: by_hand,
    "geartrain": by_geartrain,
    "geartrain, fast": partial(by_geartrain, plugins=("fast",)),
    "Lightning": by_lightning,
}


def measure(rounds: int, rows: int) -> dict[str, Any]:
    """Return samples a second of CPU time, and how many times those of the loop by hand."""
    loops = {name: partial(train, rows=rows) for name, train in LOOPS.items()}
    runs, absent = alternate(loops, [], rounds)
    hand = runs["by hand"]
    found = {}
    for name, run in runs.items():
        weights = zip(hand.result.parameters(), run.result.parameters(), strict=True)
        found[name] = {
            "samples/s": round(rows / statistics.median(run.seconds[1:])),
            "times": ratios(hand.seconds[1:], run.seconds[1:]),
            "equal": all(torch.equal(a, b) for a, b in weights),
        }
    void = abs(found[AGAIN]["times"]["ratio"] - 1) > TRUSTED
    return {"rows": found, "void": void, "not installed": absent}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="epochs; the first one warms up")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    pin()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        facts = measure(options.rounds, options.rows)
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    print("| | samples/s | times those by hand | equal |\n|---|---|---|---|")
    for name, row in facts["rows"].items():
        low, high = row["times"]["quartiles"]
        times = f"{row['times']['ratio']:.2f} ({low:.2f} to {high:.2f})"
        print(f"| {name} | {row['samples/s']:,} | {times} | {'yes' if row['equal'] else 'no'} |")
    if facts["void"]:
        print("\nvoid: the loop by hand over itself is further from 1 than 0.02")


if __name__ == "__main__":
    main()
