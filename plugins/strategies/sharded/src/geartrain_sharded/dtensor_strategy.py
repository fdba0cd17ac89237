"""The hooks that strategies share whose parameters are DTensors: clipping, steps, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.serialization import config

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import map_tensors
from geartrain_ddp import DDPStrategy
from geartrain_sharded.tensors import shard_model_state, sharded_optimizer_state, whole


class DTensorStrategy(DDPStrategy):
    """As ``ddp``, without its wrapper: parameters are DTensors, of which ranks have parts.

    Checkpoints are those of one process: rank 0 gathers them, and any strategy reads them.
    """

    hookspecs: Any = None  # no reduce_bucket: only DDP's buckets call it

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if run.mode == "session":
            message = f"{run.plan.strategy.label}: a Session saves state_dict(), which has shards"
            raise UsageError(f"{message}. Fix: use Trainer.fit, or --strategy ddp")
        return super().launch(run, worker)

    @hookimpl(wrapper=True)
    def clip_gradients(self) -> Generator[None, Any, Any]:
        norm = yield
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run, optimizer: Optimizer) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except RuntimeError as error:
            if "sharding" not in str(error).lower() and "placement" not in str(error):
                raise
            raise TrainingError(
                f"{run.plan.strategy.label}: {type(optimizer).__name__} cannot step parameters of "
                "which each rank has a part. Fix: Adam, SGD or another one that computes each "
                "element alone, or --strategy ddp"
            ) from error

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        optimizer.register_state_dict_post_hook(
            lambda _, state: map_tensors(state, partial(self._whole, run))
        )
        optimizer.register_load_state_dict_pre_hook(sharded_optimizer_state)
        return optimizer

    @hookimpl(wrapper=True)
    def model_state(self, run: Run) -> Generator[None, Any, Any]:
        state = yield
        return map_tensors(dict(state), partial(self._whole, run))

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run: Run, state: dict[str, Any]) -> Generator[None, Any, Any]:
        for name in state:
            if name not in ("fit", "model"):  # on_save_checkpoint has added it
                state[name] = map_tensors(state[name], partial(self._whole, run))
        return (yield)

    @staticmethod
    def _whole(run: Run, tensor: Any) -> torch.Tensor:
        return whole(tensor, run.world.rank == 0, run.output)

    @hookimpl(wrapper=True)
    def load_checkpoint(self) -> Generator[None, Any, Any]:
        # Each rank takes its parts out of the file. The whole may not fit its memory.
        with config.patch("load.mmap", True):  # type: ignore[attr-defined]
            return (yield)

    @hookimpl(wrapper=True)
    def load_model_state(self, run: Run, state: dict[str, Any]) -> Generator[None, Any, Any]:
        shard_model_state(state, run.module.state_dict())
        return (yield)
