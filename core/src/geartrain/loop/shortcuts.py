"""What torch does around the step of an optimizer without changing its result, and is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, optimizer as _torch

from geartrain.options import takes_shortcuts

#: The code of ``step`` as torch wraps it, and of the function inside of that, which it wraps too.
_HOOKED, _WITHOUT_GRADIENTS = (
    getattr(owner, decorator, lambda step: step)(lambda: None).__code__
    for owner, decorator in (
        (Optimizer, "profile_hook_step"),
        (_torch, "_use_grad_for_differentiable"),
    )
)
#: Functions of torch that are marked.
_marked: set[Any] = set()


def step_optimizer(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, without torch's wrappers if none of them is used."""
    if (step := plain_step(optimizer)) is None:
        optimizer.step()
    else:
        with torch.no_grad():
            step(optimizer)


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return the function inside torch's wrappers of ``step``, to call under ``torch.no_grad()``.

    They take 30 to 60 µs: a range of the profiler, hooks, and marks for the compiler. ``None`` if
    one of these is used, or ``step`` is not as torch wraps it.
    """
    step: Any = type(optimizer).step
    inner: Any = getattr(step, "__wrapped__", None)
    replaced = vars(optimizer).get("step")
    # A scheduler replaces ``step`` by a function that notes the call.
    noted = hasattr(replaced, "_wrapped_by_lr_sched") and vars(replaced)["__wrapped__"] is step
    if (
        getattr(step, "__code__", None) is not _HOOKED
        or getattr(inner, "__code__", None) is not _WITHOUT_GRADIENTS
        or not (replaced is None or noted)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch._global_optimizer_pre_hooks
        or _torch._global_optimizer_post_hooks
        or optimizer.defaults.get("differentiable", True)
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or not takes_shortcuts()
    ):
        return None
    if noted:
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return inner.__wrapped__  # type: ignore[no-any-return]


def put_off_compiler(cls: type = Optimizer) -> bool:
    """Let methods of a class of torch not import ``torch._dynamo``, which takes as long as torch.

    torch imports it at their first call, to mark them as not to be compiled. Until something else
    imports it, each is marked with itself. False if it is imported.
    """
    if "torch._dynamo" in sys.modules or not takes_shortcuts():
        return False
    for function in vars(cls).values():
        while function := getattr(function, "__wrapped__", None):
            setattr(function, "__dynamo_disable", function)
            _marked.add(function)
    if _TakeBack not in sys.meta_path:
        sys.meta_path.insert(0, _TakeBack)
    return True


class _TakeBack:
    """Removes the marks once something imports torch's compiler."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        while name == "torch._dynamo" and _marked:
            delattr(_marked.pop(), "__dynamo_disable")
