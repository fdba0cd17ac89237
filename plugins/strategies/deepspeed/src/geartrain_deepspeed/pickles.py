"""Refuse to pickle a parameter of which a rank has a part, in stage 3 of ZeRO."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from geartrain import TrainingError


def refuse_parts(module: nn.Module) -> Callable[[], None]:
    """Make pickling of the module's parameters and of its ``state_dict()`` an error.

    Returns:
        A function that takes this back.
    """
    parts: Any = module.modules()
    handles = [part.register_state_dict_post_hook(_mark_parts) for part in parts]
    copyreg.pickle(nn.Parameter, _reduce)

    def undo() -> None:
        copyreg.dispatch_table.pop(nn.Parameter, None)
        for handle in handles:
            handle.remove()

    return undo


class _Part(torch.Tensor):
    """A parameter in a ``state_dict()``, of which this rank has a part."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise TrainingError(
            f"geartrain-deepspeed[deepspeed]: rank {dist.get_rank()} pickles a parameter, as "
            "torch.save does, and in stage 3 has only a part of it. "
            "Fix: call trainer.save_checkpoint(path) on every rank"
        )


def _mark_parts(part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in part._parameters.items():
        if prefix + name in state and _is_part(parameter):
            state[prefix + name] = state[prefix + name].as_subclass(_Part)


def _reduce(parameter: nn.Parameter) -> Any:
    return (parameter.as_subclass(_Part) if _is_part(parameter) else parameter).__reduce_ex__(2)


def _is_part(parameter: Any) -> bool:
    return hasattr(parameter, "ds_shape") and parameter.shape != parameter.ds_shape
