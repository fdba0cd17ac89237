"""Kill a fit while it writes, resume it, and compare it with a fit that was not killed.

Weights must be equal bit for bit, and files by name. Run it by hand; pytest does not collect it:
``python tests/drills/kill_during_write.py [KILLS] [single ddp]``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EPOCHS = 4


# --- the program that is killed ------------------------------------------------------------------


def program(strategy: str, folder: str, kill_at: int) -> None:
    """Fit, and kill this process at one of its writes, syncs, renames and deletions.

    Prints the number of these operations after each epoch.

    Args:
        kill_at: the number of the operation; 0: do not kill.
    """
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import geartrain as gt
    from geartrain.callbacks import ModelCheckpoint
    from geartrain.files import atomic as whole_files

    class Net(gt.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 300),
                nn.Dropout(0.2),
                nn.ReLU(),
                nn.Linear(300, 300),
                nn.ReLU(),
                nn.Linear(300, 1),
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(dim=1, keepdim=True))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    done = 0

    def counted(
        action: Callable[..., Any], half: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == kill_at:
                if half is not None:
                    half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args, **options)

        return act

    write = whole_files._File.write
    whole_files._File.write = counted(
        write, lambda file, data: write(file, bytes(data)[: len(data) // 2])
    )  # type: ignore[method-assign]
    os.fsync, os.replace, os.unlink = counted(os.fsync), counted(os.replace), counted(os.unlink)

    class Says:
        @gt.hookimpl
        def on_epoch_start(self, run: gt.Run) -> None:
            if run.world.rank == 0:
                print("moments", done, flush=True)

    data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))
    plugins = [
        ModelCheckpoint("val_loss", save_top_k=2, save_last=True, filename="best-{epoch}"),
        ModelCheckpoint(every_n_train_steps=4, filename="step-{step}"),
        Says(),
    ]
    options = {"devices": 2} if strategy == "ddp" else {}
    trainer = gt.Trainer(
        max_epochs=EPOCHS,
        output=folder,
        accelerator="cpu",
        strategy=strategy,
        enable_progress_bar=False,
        seed=1,
        plugins=plugins,
        **options,
    )
    batch = 8 // len(range(options.get("devices", 1)))
    trainer.fit(
        Net(),
        DataLoader(data, batch_size=batch, shuffle=True),
        DataLoader(data, batch_size=batch),
        ckpt_path="auto",
    )


# --- the drill -----------------------------------------------------------------------------------


def start(strategy: str, folder: Path, kill_at: int = 0) -> tuple[int, str, int]:
    """Run the program; return its exit code, its output, and 1 if it left a process, else 0."""
    command = [sys.executable, __file__, "program", strategy, str(folder), str(kill_at)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines = []
    assert process.stdout is not None
    try:
        out, _ = process.communicate(timeout=120)
        lines.append(out)
    except subprocess.TimeoutExpired:
        lines.append("TIMEOUT")
    left = 0
    try:
        os.killpg(process.pid, 0)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)
        left = 1
    except ProcessLookupError:
        pass
    return process.wait(), "".join(lines), left


def tensors(state: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a checkpoint by path, without the run's random identity and folder."""
    if isinstance(state, dict):
        return {
            name: value
            for key, item in state.items()
            if key not in ("identity", "output")
            for name, value in tensors(item, f"{path}.{key}").items()
        }
    if isinstance(state, list | tuple):
        return {
            name: value
            for index, item in enumerate(state)
            for name, value in tensors(item, f"{path}.{index}").items()
        }
    return {path: state}


def differences(whole: Path, other: Path) -> list[str]:
    found = []
    names = [
        sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file())
        for one in (whole, other)
    ]
    if names[0] != names[1]:
        found.append(f"files: {sorted(set(names[0]) ^ set(names[1]))}")
    for name in (name for name in names[0] if name.endswith(".ckpt") and name in names[1]):
        a, b = (tensors(torch.load(one / name, weights_only=True)) for one in (whole, other))
        odd = [
            key for key in {**a, **b} if key not in a or key not in b or not equal(a[key], b[key])
        ]
        if odd:
            found.append(f"{name}: {len(odd)} values, {odd[:3]}")
    return found


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def main(kills: int, strategies: list[str]) -> None:
    random.seed(0)
    failed = False
    print(f"{'strategy':<10}{'killed at':<14}{'files left by the kill':<24}{'after the resume'}")
    with tempfile.TemporaryDirectory() as folder:
        for strategy in strategies:
            whole = Path(folder, strategy)
            code, out, _ = start(strategy, whole)
            assert code == 0, out
            moments = [
                int(line.split()[1]) for line in out.splitlines() if line.startswith("moments")
            ]
            for number in range(kills):
                at, other = 1 + random.randrange(moments[-1]), Path(folder, f"{strategy}-{number}")
                code, out, left = start(strategy, other, at)
                assert code == -signal.SIGKILL, (code, out)
                leftovers = (
                    sum(path.name.startswith(".") for path in other.rglob("*"))
                    if other.exists()
                    else 0
                )
                code, out, more = start(strategy, other)
                odd = (
                    differences(whole, other) if code == 0 else [f"exit code {code}: {out[-400:]}"]
                )
                odd += ["a process was left"] * (left + more)
                failed |= bool(odd)
                verdict = "equal, nothing left" if not odd else "; ".join(odd)
                print(
                    f"{strategy:<10}{f'{at} of {moments[-1]}':<14}{leftovers:<24}{verdict}",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        program(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:] or ["single", "ddp"])
