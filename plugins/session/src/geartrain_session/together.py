"""A Session among its other ranks, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from geartrain import UsageError, seed_everything
from geartrain.plugin_api import LocalMetric, MetricOptions, check_name, fire, map_tensors, save, scalar, sync, user_path
from geartrain_session import state as states
from geartrain_session.launched import Launched

#: How a Session logs what is to be the mean over ranks.
_MEAN = MetricOptions(prog_bar=False, logger=True, on_step=True, on_epoch=False, reduce_fx="mean", sync_dist=True, rank_zero_only=False)


class Together(Launched):
    """What a Session does with the other ranks, and what it writes, logs and reads."""

    def all_gather(self, data: Any) -> Any:
        """Each tensor of ``data`` from every rank: ``[world_size, *shape]``, or a list where first dimensions differ."""
        run = self._need("all_gather")
        return map_tensors(data, lambda tensor: run.hooks.all_gather(run=run, tensor=tensor))

    def all_reduce(self, data: Any, reduce_op: str = "mean") -> Any:
        """Each tensor of ``data``, of one shape on all ranks, as the ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` over ranks."""
        run = self._need("all_reduce")
        reduce = {"mean": lambda t: t.double().mean(0).to(t.dtype if t.is_floating_point() else torch.float32)}
        reduce |= {"sum": lambda t: t.sum(0), "min": lambda t: t.amin(0), "max": lambda t: t.amax(0)}
        if reduce_op not in reduce:
            raise UsageError(f"all_reduce: reduce_op={reduce_op!r}. Fix: one of {', '.join(reduce)}")
        return map_tensors(data, lambda tensor: reduce[reduce_op](torch.stack(list(run.hooks.all_gather(run=run, tensor=tensor)))))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object, on every rank."""
        run = self._need("broadcast")
        return run.hooks.broadcast(run=run, obj=obj, src=src)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        run = self._need("barrier")
        run.hooks.barrier(run=run)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let rank 0 (``local``: of each node) do something before the others do it: download, for one."""
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()

    # --- what is written -------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, step: int | None = None, sync_dist: bool = False) -> None:
        """Hand one number to the loggers and metrics.jsonl, now: the CPU waits for the GPU where it is a tensor there."""
        self.log_dict({name: value}, step, sync_dist)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None, sync_dist: bool = False) -> None:
        """Hand numbers to the loggers and metrics.jsonl, now.

        Args:
            metrics: numbers, or tensors of one element, by name.
            step: default: optimizer steps done.
            sync_dist: log the mean over ranks, which all must call this with the same names; otherwise rank 0's own are logged.

        Raises:
            TrainingError: a value that is no number; or ranks that log different names with ``sync_dist``.
        """
        run = self._need("log")
        if not self._begun:
            self._begin()
        for name in metrics:
            check_name(name)
        values = {name: float(scalar(name, value)) for name, value in metrics.items()}
        if sync_dist and run.world.size > 1:
            values, _, _ = sync(run, {name: LocalMetric(_MEAN, value, 1, None, [value]) for name, value in values.items()})
        run.reported.update(values)
        run.logs.logged.update(values)
        if run.world.rank == 0:
            fire(run.hooks.log_metrics, run=run, metrics=values, step=run.step if step is None else step)

    def save(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all. Every rank calls it.

        Args:
            state: models, optimizers, whatever has ``state_dict()``, and plain values and tensors, by name.

        Raises:
            UsageError: something else, which :meth:`load` could not read.
        """
        save(self._need("save"), states.of(state), user_path(path, "path"))

    def load(self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True) -> dict[str, Any]:
        """Read a checkpoint, in place: models and optimizers take their states, plain values of ``state`` are replaced.

        Args:
            state: what :meth:`save` was given; default: nothing is loaded, all is returned.
            strict: refuse a file without a name that ``state`` has; models are always strict.

        Returns:
            What the file has beside it.

        Raises:
            UsageError: there is no such file.
            TrainingError: it is damaged, is no checkpoint, lacks a name or does not fit.
        """
        run, path = self._need("load"), user_path(path, "path")
        found = run.hooks.load_checkpoint(run=run, path=path)
        return states.take(path, found, {} if state is None else state, strict)

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``name`` of every callback that has one."""
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if callable(method):
                self._called = True
                method(*args, **kwargs)

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on rank 0 only."""
        if self.is_global_zero:
            print(*values, **options)

    def seed_everything(self, seed: int) -> int:
        """Seed Python's, NumPy's and torch's generators; the same on every rank. Returns the seed."""
        return seed_everything(seed)
