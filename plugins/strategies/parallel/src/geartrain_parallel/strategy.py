"""The base class of strategies whose ranks use torch.distributed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from geartrain import Run, hookimpl
from geartrain.plugin_api import RankCoordinator
from geartrain_parallel import collectives, headers, sharding
from geartrain_parallel.deadlock import Watch
from geartrain_parallel.launching import launch
from geartrain_parallel.ranks import SeveralRanks
from geartrain_parallel.reports import disconnect_if_failed


class ProcessGroupStrategy:
    """Starts or joins ranks, shards data, and implements collectives with torch.distributed.

    Collectives use the default process group. A subclass makes this group in
    ``setup_process_group``, and reduces gradients. It may override every other hook, too.
    """

    #: How long ranks wait for each other at the start.
    timeout: timedelta = timedelta(minutes=30)
    #: True if a library communicates in a step: its collectives meet no header of headers.py.
    library_communicates = False
    _watch: Watch | None = None

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        return launch(
            run, partial(self._work, worker) if self.library_communicates else worker, self.timeout
        )

    def _work(self, worker: Callable[[int], Any], local_rank: int) -> Any:
        """Call the worker; after a deadlock raise its error, not that of the closed connection."""
        self._watch = None
        try:
            return worker(local_rank)
        except BaseException as error:
            if self._watch is None or self._watch.error is None:
                raise
            raise self._watch.error from error

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        if self._watch is not None:  # now, because the teardown disconnects from the store
            self._watch.explain(error)
        if isinstance(error, NotImplementedError) and "Sparse" in str(error):
            error.add_note(f"{run.plan.strategy.label}: {collectives.SPARSE}")

    @hookimpl
    def make_coordinator(self, run: Run) -> RankCoordinator:
        if self.library_communicates:
            headers.separate(run)
            self._watch = Watch(run)
        return SeveralRanks()

    @hookimpl
    def shard_dataloader(self, run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
        return sharding.shard(run, loader, stage)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        collectives.refuse_sparse(run)
        model = model.to(run.device)
        # Without a seed every rank has different weights.
        if run.world.size > 1:
            collectives.broadcast_weights(run, model)
        return model

    def average_gradients(
        self, run: Run, parameters: Sequence[nn.Parameter], changed: Sequence[bool]
    ) -> list[nn.Parameter]:
        """Average gradients over ranks; see :func:`geartrain.parallel.average_gradients`.

        manual optimisation calls it after each backward.
        """
        return collectives.average_gradients(run, parameters, changed)

    # --- collectives ------------------------------------------------------------------------------

    @hookimpl
    def log_sync(self, run: Run, values: torch.Tensor) -> torch.Tensor:
        return values[None] if run.world.size == 1 else collectives.gather_values(run, values)

    @hookimpl
    def all_gather(self, run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        return tensor[None] if run.world.size == 1 else collectives.gather_uneven(run, tensor)

    @hookimpl
    def broadcast(self, run: Run, obj: Any, src: int) -> Any:
        return obj if run.world.size == 1 else collectives.broadcast_object(run, obj, src)

    @hookimpl
    def barrier(self, run: Run) -> None:
        if run.world.size > 1:
            collectives.wait_for_all(run)

    @hookimpl
    def teardown_process_group(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            headers.join()
        if dist.is_initialized():
            # Destroy the model's wrapper before the process group. If DDP's reducer were the last
            # owner of the group, it would end gloo's threads while it holds the GIL, and hang if a
            # thread waits for the GIL. A group that outlives the run may abort the interpreter.
            gc.collect()
            disconnect_if_failed()
            dist.destroy_process_group()
