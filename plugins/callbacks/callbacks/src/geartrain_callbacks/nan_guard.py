"""``nan_guard``: detect a loss or gradients that are no longer finite."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.norms import norms_of

#: In place of a step number: no bad step so far.
_NEVER = 2**31 - 1


class NaNGuard(PluginCallback):
    """Fail or skip at NaN and infinity in the loss, or in the gradients after their reduction.

    All ranks act together. With ``"raise"`` the first bad step is recorded on the device. The CPU
    reads it every ``log_every_n_steps`` steps, after each epoch and before each checkpoint, when it
    waits for the device anyway. Until then training continues, with weights that NaN may have
    damaged.

    With ``"skip"`` the result is needed before the optimizer steps, so the CPU waits for the
    device once a step, and several ranks agree in one small collective. A skipped step has no
    gradients: optimizers change nothing and schedulers do not advance. The metric
    ``skipped_nan_steps`` counts skipped steps per epoch. Changes made by forward (BatchNorm's
    statistics) remain.

    With both, the run fails if a trained parameter is not finite after an epoch or when a
    checkpoint is due. So a checkpoint never has such weights, and the newest one can be resumed.

    Args:
        action: ``"raise"`` fails the run, ``"skip"`` leaves the step out.
        check: ``"loss"`` or ``"gradients"``. ``"gradients"`` names the first bad parameter. It is
            refused with 16-mixed, whose scaler produces infinite gradients on purpose and skips
            those steps itself.

    Raises:
        UsageError: an option is wrong, or does not work with the precision or the optimizer.
        TrainingError: a value was not finite.
    """

    def __init__(
        self,
        action: Literal["raise", "skip"] = "raise",
        check: Literal["loss", "gradients"] = "loss",
    ) -> None:
        for name, value, known in (
            ("action", action, ("raise", "skip")),
            ("check", check, ("loss", "gradients")),
        ):
            if value not in known:
                raise UsageError(f"nan_guard: {name}={value!r}. Fix: use one of {', '.join(known)}")
        self.action, self.check = action, check
        #: The first value that was not finite, and its step; empty if all were finite.
        self.reason = ""
        #: Names -> int32 ``[len(names)]`` on the device: the first bad step (from 1) of each.
        self._first: dict[tuple[str, ...], torch.Tensor] = {}
        self._drop = False

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if self.check == "gradients" and plan.precision.name == "16-mixed":
            raise UsageError(
                "geartrain-callbacks[nan_guard]: with 16-mixed, gradients overflow from time to "
                "time, and the scaler skips those steps. "
                "Fix: check='loss', or --precision bf16-mixed"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self.reason, self._first, self._drop = "", {}, False
        if self.action == "skip" and run.loop.needs_closure:
            raise UsageError(
                "geartrain-callbacks[nan_guard] cannot skip steps of an optimizer that needs "
                "a closure. Fix: action='raise'"
            )

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if self.action == "skip":
            self._count(run, 0)

    # --- detection -------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def backward(self, run: Run, loss: torch.Tensor) -> Generator[None, Any, Any]:
        if self.check == "loss":
            self._note(run, ("the loss",), loss.detach().reshape(1))
        return (yield)

    @hookimpl(wrapper=True)
    def clip_gradients(self, run: Run) -> Generator[None, Any, Any]:
        if self.check == "gradients":
            found = [
                (name, p.grad) for name, p in run.parameters_of_step().items() if p.grad is not None
            ]
            if found:
                # The largest element: a sum of squares of finite elements may overflow.
                norms = norms_of([grad for _, grad in found], float("inf"))
                self._note(run, tuple(name for name, _ in found), norms)
        self._drop = self.action == "skip" and self._is_bad_anywhere(run)
        if self._drop:
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(
        self, run: Run, optimizer: Optimizer
    ) -> Generator[None, bool | None, bool | None]:
        stepped = yield  # without gradients the optimizer changes nothing
        return False if self._drop else stepped

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if self.action == "skip":
            if self._drop:
                self._count(run, 1)
            self._first, self._drop = {}, False
        elif run.step % run.plan.options.log_every_n_steps == 0:
            self._raise_if_bad(run)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        self._raise_if_bad(run, self._bad_parameter(run))

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        self._raise_if_bad(run, self._bad_parameter(run))
        return (yield)

    def _note(self, run: Run, names: tuple[str, ...], values: torch.Tensor) -> None:
        """Record, on the device, the first step in which ``values`` (``[len(names)]``) are bad."""
        first = self._first.get(names)
        if first is None:
            first = self._first[names] = torch.full(
                values.shape, _NEVER, dtype=torch.int32, device=values.device
            )
        torch.minimum(
            first,
            torch.where(torch.isfinite(values), _NEVER, run.step + 1).to(torch.int32),
            out=first,
        )

    # --- reaction --------------------------------------------------------------------------------

    def _is_bad_anywhere(self, run: Run) -> bool:
        """True if this step is bad on any rank. The CPU waits for the device here."""
        bad = any(bool((first < _NEVER).any()) for first in self._first.values())
        return any(flag for flag, _ in self._gather_flags(run, bad, _NEVER))

    def _bad_parameter(self, run: Run) -> str:
        """Return the first trained parameter that is not finite; empty if all are finite."""
        trained = {n: p.detach() for n, p in run.module.named_parameters() if p.requires_grad}
        trained = {name: parameter for name, parameter in trained.items() if parameter.numel()}
        if not trained:
            return ""
        finite = torch.isfinite(norms_of(list(trained.values()), float("inf"))).tolist()
        bad = next((name for name, good in zip(trained, finite, strict=True) if not good), "")
        return bad and f"the parameter {bad}"

    def _raise_if_bad(self, run: Run, parameter: str = "") -> None:
        """Read the records, agree with the other ranks, and fail on all. The CPU waits here.

        Args:
            parameter: a parameter that is not finite, for a step that has no other reason.

        Raises:
            TrainingError: a value was not finite on some rank.
        """
        found = [
            (step, name)
            for names, first in self._first.items()
            for step, name in zip(first.tolist(), names, strict=True)
        ]
        step, name = min(found, key=lambda record: record[0], default=(_NEVER, ""))
        where = name if self.check == "loss" else f"the gradient of {name}"
        if step == _NEVER and parameter:
            step, where = run.step, parameter
        flags = self._gather_flags(run, step < _NEVER, step)
        bad = [(when, rank) for rank, (flag, when) in enumerate(flags) if flag]
        if not bad:
            return
        when, rank = min(bad)
        if run.world.size > 1:
            where = run.hooks.broadcast(run=run, obj=where, src=rank)
        self.reason = f"{where} was not finite in step {when}, on rank {rank}."
        raise TrainingError(
            f"geartrain-callbacks[nan_guard]: {self.reason} "
            "Fix: lower the learning rate, clip gradients, or look at that batch"
        )

    def _gather_flags(self, run: Run, flag: bool, step: int) -> list[tuple[bool, int]]:
        """Return the flag and the step of each rank."""
        if run.world.size == 1:
            return [(flag, step)]
        table = run.hooks.log_sync(
            run=run, values=torch.tensor([flag, step], dtype=torch.float64)
        ).tolist()
        return [(bool(row[0]), int(row[1])) for row in table]

    def _count(self, run: Run, skipped: int) -> None:
        run.log(
            "skipped_nan_steps",
            skipped,
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            batch_size=1,
        )
