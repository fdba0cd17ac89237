"""Damage checkpoints in many ways, load each, and count wrong values and errors of other libraries.

Run it by hand; pytest does not collect it: ``python tests/drills/mutate_checkpoints.py [NUMBER]``.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Net(gt.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(dim=1, keepdim=True))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


#: Not the global generator, because a run with a seed sets that one.
random = Random(0)

DATA = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)


class Loaded(Exception):
    """Carries the values of a run that loaded the file."""


class Looks:
    @gt.hookimpl
    def on_run_start(self, run: gt.Run) -> None:
        tensors = dict(run.module.state_dict())
        for number, optimizer in enumerate(run.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {
                    f"optimizer {number}.{index}.{name}": value for name, value in state.items()
                }
        raise Loaded({name: value.clone() for name, value in tensors.items()})


def trainer(epochs: int, output: Path | None = None) -> gt.Trainer:
    plugins = [] if output is not None else [Looks()]
    return gt.Trainer(
        max_epochs=epochs,
        output=output,
        accelerator="cpu",
        enable_progress_bar=False,
        seed=1,
        plugins=plugins,
    )


WAYS: dict[str, Callable[[int, Path], Any]] = {
    "fit(ckpt_path=)": lambda width, path: trainer(9).fit(Net(width), DATA, ckpt_path=path),
    "fit(checkpoint=)": lambda width, path: trainer(9).fit(Net(width), DATA, checkpoint=path),
    "validate(ckpt_path=)": lambda width, path: trainer(9).validate(
        Net(width), DATA, ckpt_path=path
    ),
}


def mutations(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield damaged copies of the data and their kinds, in turn and without end."""
    at, size = random.randrange, len(data)

    def put(begin: int, new: bytes) -> bytes:
        return (data[:begin] + new + data[begin + len(new) :])[:size]

    def swap(block: int) -> bytes:
        a, b = sorted((at(size // block) * block, at(size // block) * block))
        first, second = data[a : a + block], data[b : b + block]
        return (
            data[:a] + second + data[a + block : b] + first + data[b + block :] if a != b else data
        )

    while True:
        begin = at(size)
        yield "bit flip", put(begin, bytes([data[begin] ^ 1 << at(8)]))
        yield "several bit flips", bytes(bytearray_with_flips(data, 1 + at(20)))
        yield "byte run", put(at(size), random.randbytes(1 + at(4096)))
        yield "truncated", data[: at(size)]
        yield (
            "extended",
            data
            + random.choice(
                [bytes(1 + at(4096)), random.randbytes(1 + at(4096)), data[-at(200) - 1 :]]
            ),
        )
        yield "blocks swapped", swap(random.choice([64, 512, 4096]))
        yield "range zeroed", put(at(size), bytes(1 + at(65536)))
        yield "end damaged", put(max(0, size - 1 - at(300)), random.randbytes(1 + at(8)))


def bytearray_with_flips(data: bytes, number: int) -> bytearray:
    changed = bytearray(data)
    for _ in range(number):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return changed


def outcome(load: Callable[[], Any], expected: dict[str, torch.Tensor], path: Path) -> str:
    try:
        load()
    except Loaded as loaded:
        found = loaded.args[0]
        same = found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )
        return "loaded the same values" if same else "LOADED OTHER VALUES"
    except gt.TrainingError as error:
        clear = str(path) in str(error) and "Fix:" in str(error) and "\n" not in str(error)
        return "refused" if clear else "REFUSED WITHOUT NAME OR FIX"
    except Exception as error:
        return f"RAW ERROR {type(error).__name__}"
    return "NOT LOADED AT ALL"


def main(number: int) -> None:
    warnings.simplefilter("ignore")
    print(f"{'checkpoint':>12} {'kind':<18} outcomes of {', '.join(WAYS)}")
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for width in (4, 630):
            trainer(1, Path(folder, str(width))).fit(Net(width), DATA)
            source, odd = Path(folder, str(width), "last.ckpt"), Path(folder, "odd.ckpt")
            data, table, seen = source.read_bytes(), {}, 0
            expected = {}
            for name, way in WAYS.items():
                try:
                    way(width, source)
                except Loaded as loaded:
                    expected[name] = loaded.args[0]
            for kind, damaged in mutations(data):
                if damaged == data:
                    continue
                odd.write_bytes(damaged)
                for name, way in WAYS.items():
                    found = outcome(partial(way, width, odd), expected[name], odd)
                    table.setdefault(kind, Counter())[found] += 1
                seen += 1
                if seen == number // 2:
                    break
            for kind, counts in table.items():
                outcomes = ", ".join(f"{found}: {count}" for found, count in counts.items())
                print(f"{len(data) / 1e6:9.3f} MB {kind:<18} {outcomes}")
                total += counts
    print(f"{number} mutations, each loaded in {len(WAYS)} ways: {dict(total)}")
    sys.exit(bool(total.keys() - {"refused", "loaded the same values"}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
