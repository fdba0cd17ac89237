"""The defaults of single hooks that no plugin owns: one process on one device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain.checkpoint import files as checkpoint_file
from geartrain.checkpoint.checkpoints import read
from geartrain.data.loaders import MappedBatches, moves_nothing
from geartrain.hookspecs import hookimpl
from geartrain.launch.signals import raise_on_signals
from geartrain.loop.fit import train_step
from geartrain.loop.ranks import RankCoordinator
from geartrain.loop.run import Run, World
from geartrain.loop.shortcuts import step_optimizer
from geartrain.plan import Layout, PlanRequest

_NOTHING: AbstractContextManager[None] = nullcontext()


class Defaults:
    """Owns each single hook that no other part owns."""

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(len(request.devices), 1)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if run.cluster is not None:
            run.cluster.check(run.plan)
            if run.cluster.launcher == "torchrun":  # it shows the error that the process records
                from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                run.loop.report_failure = get_error_handler().record_exception
        # Not SIGINT: Ctrl-C raises KeyboardInterrupt already.
        with raise_on_signals([signal.SIGTERM, signal.SIGHUP]):
            return worker(0)

    @hookimpl
    def setup_device(self) -> torch.device:
        return torch.device("cpu")

    @hookimpl
    def setup_process_group(self) -> World:
        return World()

    @hookimpl
    def make_coordinator(self) -> RankCoordinator:
        return RankCoordinator()

    @hookimpl
    def shard_dataloader(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        return model.to(run.device)

    @hookimpl
    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    @hookimpl
    def load_checkpoint(self, run: Run, path: Path) -> dict[str, Any]:
        return read(run, path)

    @hookimpl
    def device_batches(self, run: Run, loader: Iterable[Any]) -> Iterator[Any]:
        batches = iter(loader)
        return batches if moves_nothing(run) else MappedBatches(batches, loader, run.to_device)

    # The function itself, not a method that calls it, which saves a call in every step.
    step = staticmethod(hookimpl(train_step))

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        return run.loop.step_functions[method](*args)

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        pass

    @hookimpl
    def clip_gradients(self, run: Run) -> torch.Tensor | None:
        return None

    @hookimpl
    def optimizer_step(
        self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> bool | None:
        step_optimizer(optimizer) if closure is None else optimizer.step(closure)
        return None

    @hookimpl
    def log_sync(self, values: torch.Tensor) -> torch.Tensor:
        return values[None]

    @hookimpl
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        return tensor[None]

    @hookimpl
    def broadcast(self, obj: Any) -> Any:
        return obj

    @hookimpl
    def barrier(self) -> None:
        pass

    @hookimpl
    def model_state(self, run: Run) -> dict[str, Any]:
        return run.module.state_dict()

    @hookimpl
    def load_model_state(self, run: Run, state: dict[str, Any]) -> None:
        run.module.load_state_dict(state)

    @hookimpl
    def save_checkpoint(self, run: Run, state: dict[str, Any], path: Path) -> None:
        if run.world.rank == 0:
            checkpoint_file.write(state, path)

    @hookimpl
    def teardown_process_group(self) -> None:
        pass

    @hookimpl
    def teardown_device(self) -> None:
        pass
