"""Give a module back as it was before ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor

from geartrain.parallel import absent_weights

#: Dicts of a module in which ``fully_shard`` registers hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_pre_hooks",
)
#: The start of names of attributes that ``fully_shard`` sets.
_MARKS = ("__composable_api_state_key", "_fsdp_", "_is_fsdp_")


class PlainModules:
    """A model before ``fully_shard``, which changes the modules themselves.

    torch has no function that takes ``fully_shard`` back.

    Args:
        model: with whole parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes = {module: type(module) for module in model.modules()}

    def restore(self, whole: Callable[[Any], torch.Tensor], keeps: bool) -> None:
        """Replace shards by whole parameters on the CPU, and take hooks and classes back.

        Every rank calls it.

        Args:
            whole: gathers a parameter.
            keeps: True on the rank that gets the values. On others each parameter has a NaN. A
                next run gets them from rank 0.
        """
        plain: dict[int, nn.Parameter] = {}  # by the shard, so that tied weights stay tied
        for module, cls in self._classes.items():
            module.__class__ = cls
            _module_state_mapping.pop(module, None)
            for name in [name for name in vars(module) if name.startswith(_MARKS)]:
                delattr(module, name)
            for hooks in (getattr(module, name) for name in _HOOKS):
                for number in [n for n, hook in hooks.items() if _is_fsdp(hook)]:
                    del hooks[number]
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    if id(parameter) not in plain:
                        plain[id(parameter)] = _plain(parameter, whole, keeps)
                    module._parameters[name] = plain[id(parameter)]


def _plain(shard: Any, whole: Callable[[Any], torch.Tensor], keeps: bool) -> nn.Parameter:
    value = whole(shard)
    return nn.Parameter(
        value if keeps else absent_weights(shard.shape, shard.dtype), shard.requires_grad
    )


def _is_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
