"""The line before a ``fit``, the mark of its best epoch, and the lines on its files after it."""

from __future__ import annotations

import json
import math
import re
import shlex
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from torch.nn.parameter import is_lazy

from geartrain import Run
from geartrain_callbacks.monitoring import is_better


def header(run: Run) -> str:
    """Return the module and its size, the devices, the strategy, and the folder of the run."""
    plan = run.plan
    text = f"{type(run.module).__name__} ({_size(run.module)}) on {_devices(run)}"
    if plan.strategy.name != "single":
        text += f" with {plan.strategy.name}"
    if run.output is not None:
        text += f", in {run.output}"
    if run.loop.resumed is not None:
        text += f", resumes after {run.step} steps"
    return text


def _size(module: Any) -> str:
    parameters = list(module.parameters())
    known = [p for p in parameters if not is_lazy(p)]
    total, trained = (
        sum(p.numel() for p in group) for group in (known, [p for p in known if p.requires_grad])
    )
    text = f"{total:,} parameters"
    if trained < total:
        text += f", {trained:,} trainable"
    if lazy := len(parameters) - len(known):
        text += f", {lazy} without a shape yet"
    return text


def _devices(run: Run) -> str:
    name, devices, nodes = run.plan.accelerator.name, run.plan.devices, run.plan.num_nodes
    if len(devices) > 1:
        text = f"{len(devices)} {name} devices"
    else:
        text = name if name == "cpu" else f"{name} {devices[0]}"
    return text if nodes == 1 else f"{text} of each of {nodes} nodes"


class BestEpoch:
    """The best epoch so far.

    The metric is the one that a callback monitors, as ModelCheckpoint and EarlyStopping do;
    otherwise the first loss of validation, as ``val_loss``.
    """

    def __init__(self, run: Run) -> None:
        #: The metric, and ``"min"`` or ``"max"``; empty if none is known yet.
        self._name, self._mode = "", "min"
        self._best: float | None = None
        self._epoch = 0
        for part in run.hooks.parts:
            callback = getattr(part.plugin, "callback", part.plugin)
            name, mode = (getattr(callback, option, None) for option in ("monitor", "mode"))
            if isinstance(name, str) and mode in ("min", "max") and name not in ("epoch", "step"):
                self._name, self._mode = name, mode
                # That of a fit which resumes.
                attributes = ("best_model_score", "best_score")
                scores = (getattr(callback, attribute, None) for attribute in attributes)
                known = (s for s in scores if isinstance(s, int | float) and math.isfinite(s))
                self._best = next(known, None)
                break
        if run.loop.resumed is not None and run.plan.output is not None:
            self._read(run.plan.output / "metrics.jsonl", run.epoch)

    def _read(self, path: Path, epochs: int) -> None:
        """Find the best of the epochs that an earlier process trained."""
        found: dict[int, tuple[str, float]] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):  # a user's file may be anything
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                name = self._name or next(filter(_is_validation_loss, line), "")
                if line["epoch"] < epochs and isinstance(line.get(name), int | float):
                    found[line["epoch"]] = name, line[name]  # of two lines the later counts
        for epoch, (name, value) in sorted(found.items()):
            if not self._epoch or is_better(self._mode, value, found[self._epoch - 1][1]):
                self._name, self._best, self._epoch = name, value, epoch + 1

    def is_new(self, run: Run) -> bool:
        """True if the epoch that has just ended is the best so far."""
        metrics = run.metrics
        if not self._name:
            self._name = next(filter(_is_validation_loss, metrics), "")
        value = metrics.get(self._name, math.nan)
        worst = math.inf if self._mode == "min" else -math.inf
        if not is_better(self._mode, value, worst if self._best is None else self._best):
            return False
        self._best, self._epoch = value, run.epoch + 1
        return True

    def text(self) -> str:
        """Return the best epoch and its metric; empty if there is none."""
        return f"best {self._name}={self._best:.4g} in epoch {self._epoch}" if self._epoch else ""


def _is_validation_loss(name: str) -> bool:
    words = re.split("[^a-z]+", name.lower())
    return words[0] in ("val", "valid", "validation") and "loss" in words


def places(run: Run, option: str) -> list[str]:
    """Return lines on the files of a ``fit`` that has ended, and on the command that shows them.

    Args:
        option: how the user gives a run a folder.
    """
    trainer, output = run.trainer, run.plan.output
    if output is not None:
        lines = [f"saved in {output}"]
        if any(command.name == "report" for command in trainer.setup.registry.of("command")):
            lines.append(f"look: geartrain report {shlex.quote(str(output))}")
        return lines
    if run.plan.options.fast_dev_run:
        return ["nothing was saved: fast_dev_run"]
    found = (run.hooks.find_checkpoint(which=which, output=None) for which in ("best", "last"))
    files = chain.from_iterable(chain.from_iterable(found))
    if folders := dict.fromkeys(str(file.parent) for file in files if file.exists()):
        return [f"saved in {folder}" for folder in folders]
    subject = "no checkpoint" if run.hooks.implementers("log_metrics") else "nothing"
    return [f"{subject} was saved: {option}"]
