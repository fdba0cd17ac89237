"""``norms``: log the norms of gradients and parameters."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.shards import is_sharded, local, norms_of_wholes


class Norms(PluginCallback):
    """Log 2-norms of gradients and parameters. They stay on the device until the flush.

    Gradients are measured after their reduction over ranks, unscaled and before clipping:
    ``grad_norm``, and ``grad_norm/NAME`` for each. Parameters are measured before the same step:
    ``param_norm`` and ``param_norm/NAME``. Each rank logs its own values. The CPU does not wait.

    Args:
        gradients: log norms of gradients.
        parameters: log norms of the trained parameters.
        per_parameter: also log one norm for each parameter.
        every: steps between two measurements; default: ``log_every_n_steps``, because a flush
            reports only the newest.

    Raises:
        UsageError: neither gradients nor parameters, or ``every`` is wrong.
    """

    def __init__(
        self,
        gradients: bool = True,
        parameters: bool = False,
        per_parameter: bool = False,
        every: int | None = None,
    ) -> None:
        if not gradients and not parameters:
            raise UsageError(
                "norms: neither gradients nor parameters are asked for. Fix: choose one of them"
            )
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise UsageError(f"norms: every={every!r} must be a whole number of steps, at least 1.")
        self.gradients = gradients
        self.parameters = parameters
        self.per_parameter = per_parameter
        self.every = every

    @hookimpl(wrapper=True)
    def clip_gradients(self, run: Run) -> Generator[None, Any, Any]:
        if (run.step + 1) % (self.every or run.plan.options.log_every_n_steps) == 0:
            self._measure(run)
        return (yield)

    def _measure(self, run: Run) -> None:
        trained = {name: p for name, p in run.parameters_of_step().items() if p.requires_grad}
        if self.gradients:
            self._log(
                run,
                "grad_norm",
                {name: p.grad for name, p in trained.items() if p.grad is not None},
            )
        if self.parameters:
            self._log(run, "param_norm", {name: p.detach() for name, p in trained.items()})

    def _log(self, run: Run, base: str, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            return
        norms = norms_of(list(tensors.values()))
        run.log(base, torch.linalg.vector_norm(norms), on_step=True, on_epoch=False, batch_size=1)
        if self.per_parameter:
            for name, norm in zip(tensors, norms.unbind(), strict=True):
                run.log(f"{base}/{name}", norm, on_step=True, on_epoch=False, batch_size=1)


def norms_of(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return each tensor's norm: float32 ``[len(tensors)]`` on the first tensor's device.

    Of shards it is the norm of the whole tensor: every rank calls it.
    """
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if not any(map(is_sharded, dense)):
        found = torch._foreach_norm(dense, order)
        return torch.stack([norm.to(found[0].device, torch.float32) for norm in found])
    parts = list(map(local, dense))
    filled = [i for i, part in enumerate(parts) if part.numel()]
    norms = torch.zeros(len(parts), device=parts[0].device)
    if filled:
        norms[filled] = norms_of([parts[i] for i in filled], order)
    return norms_of_wholes(norms, dense, order)


def grad_norm(
    module: torch.nn.Module, norm_type: float | str, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient, and their total.

    Call it in ``on_before_optimizer_step`` and log the result:
    ``self.log_dict(grad_norm(self, norm_type=2))``. The names are ``grad_2.0_norm/NAME`` and
    ``grad_2.0_norm_total``; parameters without a gradient are left out.

    Args:
        norm_type: the order of the norm, above 0; ``"inf"`` is the largest absolute value.
        group_separator: text between ``grad_2.0_norm`` and the parameter's name.

    Raises:
        UsageError: the order is not a number above 0.
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise UsageError(
            f"grad_norm: norm_type={norm_type!r} must be above 0. Fix: 2, another number, or 'inf'"
        )
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if not gradients:
        return {}
    norms = norms_of(list(gradients.values()), order)
    names = [f"grad_{order}_norm{group_separator}{name}" for name in gradients]
    found = dict(zip(names, norms.unbind(), strict=True))
    return {**found, f"grad_{order}_norm_total": torch.linalg.vector_norm(norms, order)}
