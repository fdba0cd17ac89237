"""The strategy deepspeed: ZeRO of DeepSpeed, for one optimizer in automatic optimisation.

ZeRO: Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Plan, Run, UsageError, World, hookimpl
from geartrain.plugin_api import warn
from geartrain_ddp import DDPStrategy
from geartrain_deepspeed import config as configuration, library
from geartrain_deepspeed.engine import Engine

_NOTHING: AbstractContextManager[None] = nullcontext()
_PRECISIONS = ("32-true", "bf16-mixed")
#: Hooks in which a plugin would look for gradients that are in DeepSpeed's buffers.
_OF_GRADIENTS = ("reduce_gradients", "clip_gradients")
#: Plugins that change the weights themselves.
_OF_WEIGHTS = ("EMA", "StochasticWeightAveraging")


class DeepSpeedStrategy(DDPStrategy):
    """Strategy ``deepspeed``: as ``ddp``, with ZeRO of DeepSpeed.

    Each rank keeps 1/N of the optimizer's states (stage 1), of the gradients too (stage 2), and of
    the parameters too (stage 3). DeepSpeed's engine computes and reduces the gradients, clips them
    and steps. Each rank steps its part of flat parameters, so the optimizer must compute each
    element alone, as SGD and Adam do.

    Checkpoints are those of one process: rank 0 gathers them, and any strategy reads them. After a
    ``fit``, rank 0's module has whole plain weights, and that of each rank in stages 1 and 2.

    Args:
        stage: of ZeRO, 1, 2 or 3.
        config: a JSON file of DeepSpeed, such as ``{"zero_optimization": {"reduce_bucket_size":
            5e7}}``, without what the Trainer decides.
        process_group_backend: as for ddp.
        timeout: as for ddp.

    Raises:
        UsageError: an option has a value that cannot be used.
    """

    hookspecs: Any = None  # no reduce_bucket: only DDP's buckets call it
    library_communicates = True

    def __init__(
        self,
        stage: int = 2,
        config: str | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        if stage not in (1, 2, 3):
            raise UsageError(f"stage={stage!r} must be 1, 2 or 3.")
        self.stage = stage
        self.config = (
            {} if config is None else configuration.read(config, stage, "geartrain-deepspeed")
        )
        #: Read by the conformance kit.
        unsupported = ("no_sync", "unused_parameters", "weighted_loss", "float64")
        self.capabilities = dict.fromkeys(unsupported, False)
        self._engine: Engine | None = None

    # --- hooks ------------------------------------------------------------------------------------

    @hookimpl  # hooks are called by argument name, so the override may add one
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]
        super().check_plan(plan)
        label = plan.strategy.label
        if not plan.assumed:
            library.check_installed(label)
        if plan.accelerator.name not in ("cpu", "cuda"):
            raise UsageError(f"{label}: it runs on cpu and cuda. Fix: --accelerator cpu")
        if plan.precision.name not in _PRECISIONS:
            message = f"{label}: precision {plan.precision.name} is not supported"
            raise UsageError(f"{message}. Fix: --precision {' or '.join(_PRECISIONS)}")
        if plan.options.gradient_clip_val and plan.options.gradient_clip_algorithm != "norm":
            message = f"{label}: DeepSpeed clips the norm of the gradients, not their values"
            raise UsageError(f"{message}. Fix: --gradient-clip-algorithm norm")
        if not module.automatic_optimization:
            message = f"{label}: DeepSpeed steps after each backward, not in manual optimisation"
            raise UsageError(f"{message}. Fix: automatic optimisation, or --strategy ddp")
        if isinstance(module, Module):
            _check_dtypes(module, label)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        label = run.plan.strategy.label
        if run.mode == "session":
            message = f"{label}: a Session steps each optimizer itself, and DeepSpeed does it here"
            raise UsageError(f"{message}. Fix: use Trainer.fit, or --strategy ddp")
        if run.command == "fit":
            for hook in _OF_GRADIENTS:
                for plugin in run.hooks.wrappers(hook):
                    message = f"{label}: {plugin.label} may need the gradients, which are in"
                    message = f"{message} DeepSpeed's buffers"
                    raise UsageError(f"{message}. Fix: take it out, or --strategy fsdp")
            for part in run.hooks.parts if self.stage == 3 else ():
                if type(part.plugin).__name__ in _OF_WEIGHTS:
                    message = f"{label}: {part.info.label} averages weights, of which ranks have"
                    message = f"{message} parts in stage 3"
                    raise UsageError(f"{message}. Fix: --strategy.stage 2, or --strategy fsdp")
        return super().launch(run, worker)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        if run.command == "fit":  # before the ranks meet: it takes seconds
            library.load(run.plan.strategy.label, run.device.type)
        return super().setup_process_group(run)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        # DeepSpeed takes the model together with its optimizer, which does not exist yet.
        return super(DDPStrategy, self).wrap_model(run, model)

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        if self._engine is not None:
            message = f"{run.plan.strategy.label}: DeepSpeed steps one optimizer"
            raise UsageError(f"{message}. Fix: return one optimizer, or --strategy fsdp")
        clip = run.plan.options.gradient_clip_val
        settings = configuration.complete(self.config, self.stage, clip)
        self._engine = Engine(run, optimizer, settings)
        return optimizer

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        if self._engine is not None:
            self._engine.begin(last)
        return _NOTHING

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        if self._engine is None:
            return run.loop.step_functions[method](*args)
        return self._engine.forward(method, args)

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:  # type: ignore[override]
        if self._engine is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._engine.backward(loss)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        """Check which parameters have gradients; DeepSpeed reduced them during backward.

        Raises:
            TrainingError: a parameter has none, or was frozen or unfrozen.
        """
        if self._engine is not None:
            self._engine.check()

    @hookimpl
    def clip_gradients(self, run: Run) -> None:
        """Leave clipping to DeepSpeed, which does it in its step."""

    @hookimpl
    def optimizer_step(
        self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> bool:
        assert self._engine is not None
        stepped = self._engine.step()
        if not stepped and run.world.rank == 0:
            message = f"{run.plan.strategy.label}: DeepSpeed skipped step {run.step + 1}"
            warn(f"{message}: the gradients have NaN or infinity")
        return stepped

    @hookimpl
    def model_state(self, run: Run) -> dict[str, Any]:
        if self._engine is None:
            return run.module.state_dict()
        return self._engine.model_state()

    @hookimpl
    def load_model_state(self, run: Run, state: dict[str, Any]) -> None:
        if self._engine is None:
            run.module.load_state_dict(state)
        else:
            self._engine.load_model_state(state)

    @hookimpl(wrapper=True)
    def on_epoch_start(self) -> Generator[None, Any, Any]:
        if self._engine is not None:
            self._engine.begin_training()
        return (yield)

    @hookimpl(wrapper=True)
    def on_epoch_end(self) -> Generator[None, Any, Any]:
        if self._engine is not None:
            self._engine.compare_changes()
        return (yield)

    @hookimpl
    def on_run_end(self) -> None:
        if self._engine is not None:
            self._engine.restore()

    @hookimpl
    def teardown_process_group(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            library.leave()
        super().teardown_process_group()


def _check_dtypes(module: Module, label: str) -> None:
    trained = {name: p.dtype for name, p in module.named_parameters() if p.requires_grad}
    dtypes = set(trained.values())
    if dtypes == {torch.float64}:
        warn(f"{label}: DeepSpeed steps parameters of float64 in float32. Fix: model.float()")
    elif dtypes - {torch.float32}:
        name, dtype = next(each for each in trained.items() if each[1] != torch.float32)
        message = f"{label}: {name} is {dtype}, and DeepSpeed trains torch.float32"
        raise UsageError(f"{message}. Fix: model.float(), with --precision bf16-mixed if needed")
