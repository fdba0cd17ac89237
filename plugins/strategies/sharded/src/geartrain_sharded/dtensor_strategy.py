"""The hooks that strategies share whose parameters are DTensors: clipping, steps, checkpoints."""

from __future__ import annotations

import copyreg
import os
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.serialization import config

from geartrain import GeartrainError, Plan, Run, TrainingError, UsageError, World, hookimpl
from geartrain.parallel import steps_in_parts
from geartrain.plugin_api import is_of_user, map_tensors
from geartrain_ddp import DDPStrategy
from geartrain_sharded.drawn import as_one_process
from geartrain_sharded.tensors import (
    part_of,
    shard_model_state,
    sharded_optimizer_state,
    whole,
)


class DTensorStrategy(DDPStrategy):
    """As ``ddp``, without its wrapper: parameters are DTensors, of which ranks have parts.

    Checkpoints are those of one process: rank 0 gathers them, and any strategy reads them.
    """

    hookspecs: Any = None  # no reduce_bucket: only DDP's buckets call it
    library_communicates = True
    #: The rank whose random numbers weights get; ``None`` if those of all ranks are equal.
    draws: int | None = 0
    _around: ExitStack | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        super().check_plan(plan)
        for part in plan.plugins:
            if part.name == "fast":
                message = f"{plan.strategy.label}: {part.label} joins parameters, of which ranks"
                raise UsageError(f"{message} have parts. Fix: leave fast out, or --strategy ddp")

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if run.mode == "session":
            message = f"{run.plan.strategy.label}: a Session saves state_dict(), which has shards"
            raise UsageError(f"{message}. Fix: use Trainer.fit, or --strategy ddp")
        return super().launch(run, worker)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        self._around = ExitStack()
        self._around.enter_context(as_one_process(self.draws))
        # Pickled, a parameter would be a file with the part of one rank, which nothing can load.
        copyreg.pickle(DTensor, partial(_refuse_to_pickle, run))
        self._around.callback(copyreg.dispatch_table.pop, DTensor)
        return super().setup_process_group(run)

    @hookimpl
    def teardown_process_group(self) -> None:
        if self._around is not None:
            self._around.close()
        super().teardown_process_group()

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        super().on_exception(run, error)
        is_of_parts = any(text in str(error) for text in ("DTensor", "sharding strategy"))
        if is_of_parts and not isinstance(error, GeartrainError):
            action = ".full_tensor() on every rank, or set the weights before fit"
            cause = "each rank has a part of this parameter"
            error.add_note(str(error_of_parts(run, error, cause, action)))

    @hookimpl(wrapper=True)
    def clip_gradients(self) -> Generator[None, Any, Any]:
        norm = yield
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        size, has_closure = run.world.size, run.loop.needs_closure
        works = steps_in_parts(optimizer, lambda *given: [part_of(*given)], size, has_closure)
        values = torch.tensor([works], dtype=torch.float64)
        if not run.hooks.log_sync(run=run, values=values).all():
            raise UsageError(
                f"{run.plan.strategy.label}: {type(optimizer).__name__} cannot step parameters of "
                "which each rank has a part. Fix: Adam, SGD or another one that computes each "
                "element alone, or --strategy ddp"
            )
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


def _refuse_to_pickle(run: Run, _: DTensor) -> Any:
    raise TrainingError(
        f"{run.plan.strategy.label}: rank {run.world.rank} pickles a parameter, as torch.save "
        "does, and has only a part of it. Fix: call trainer.save_checkpoint(path) on every rank"
    )


def error_of_parts(run: Run, error: BaseException, cause: str, action: str) -> TrainingError:
    """Return the error for torch's error that an operation cannot work on parts.

    Args:
        run: of this rank.
        error: of torch.
        cause: what the user's line does.
        action: that mends it.
    """
    text = str(error).strip().partition("\n")[0].rstrip(".")
    label = run.plan.strategy.label
    return TrainingError(f"{label}: {_line(error)}{cause}: {text}. Fix: {action}")


def _line(error: BaseException) -> str:
    """Return the innermost line of the user's code, ``"train.py:31: "``."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if is_of_user(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}: "
    return ""
