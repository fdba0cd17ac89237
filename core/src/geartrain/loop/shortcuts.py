"""What torch does around the step of an optimizer without changing its result, and is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, optimizer as _torch

from geartrain.options import takes_shortcuts


def _code(decorator: Any) -> Any:
    """Return the code of the functions that a decorator of torch makes."""
    return decorator and decorator(lambda: None).__code__


_HOOKED = _code(Optimizer.profile_hook_step)
_WITHOUT_GRADIENTS = _code(getattr(_torch, "_use_grad_for_differentiable", None))
_NOT_COMPILED = _code(getattr(torch, "_disable_dynamo", None))
#: By a class's ``step``: the same without torch's wrappers; ``None`` if it has others.
_plain_steps: dict[Any, Callable[[Optimizer], None] | None] = {}


def step_optimizer(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, without torch's wrappers if none of them is used."""
    step = plain_step(optimizer)
    optimizer.step() if step is None else step(optimizer)


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], None] | None:
    """Return a function that steps as ``optimizer.step()`` without torch's wrappers.

    They take 30 to 60 µs: a range of the profiler, hooks, and marks for the compiler. ``None`` if
    one of these is used, or ``step`` is not as torch wraps it.
    """
    step: Any = type(optimizer).step
    if step not in _plain_steps:
        _plain_steps[step] = _without_wrappers(step)
    plain, replaced = _plain_steps[step], vars(optimizer).get("step")
    # A scheduler replaces ``step`` by a function that notes the call.
    noted = hasattr(replaced, "_wrapped_by_lr_sched") and vars(replaced)["__wrapped__"] is step
    if (
        plain is None
        or not (replaced is None or noted)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch._global_optimizer_pre_hooks
        or _torch._global_optimizer_post_hooks
        or optimizer.defaults.get("differentiable", True)
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    ):
        return None
    if noted:
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return plain


def _without_wrappers(step: Any) -> Callable[[Optimizer], None] | None:
    codes = [getattr(f, "__code__", None) for f in (step, getattr(step, "__wrapped__", None))]
    if codes != [_HOOKED, _WITHOUT_GRADIENTS] or not takes_shortcuts():
        return None
    plain: Callable[[Optimizer], None] = torch.no_grad()(step.__wrapped__.__wrapped__)
    return plain


def put_off_compiler(cls: type = Optimizer) -> bool:
    """Let methods of a class of torch not import ``torch._dynamo``, which takes as long as torch.

    torch imports it at their first call, to mark them as not to be compiled. Until something else
    imports it, each is marked with itself. False if it is imported.
    """
    if "torch._dynamo" in sys.modules or not takes_shortcuts():
        return False
    for function in vars(cls).values():
        while (inner := getattr(function, "__wrapped__", None)) is not None:
            disabled = getattr(function, "__code__", None) is _NOT_COMPILED is not None
            if disabled and not hasattr(inner, "__dynamo_disable"):
                setattr(inner, "__dynamo_disable", inner)
                _marked.append(inner)
            function = inner
    if _TakeBack not in sys.meta_path:
        sys.meta_path.insert(0, _TakeBack)
    return True


_marked: list[Any] = []


class _TakeBack:
    """Removes the marks once something imports torch's compiler."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        while name == "torch._dynamo" and _marked:
            delattr(_marked.pop(), "__dynamo_disable")
