"""DeepSpeed's collectives, on which ranks agree before they enter them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from geartrain import Run
from geartrain.parallel import CollectiveOrder

#: Methods of DeepSpeed's backend.
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_FIX = "run the same parts on each rank, in the same order, and let the loss need them"


class OrderedBackend:
    """A backend of DeepSpeed whose collectives ranks agree on.

    Args:
        backend: DeepSpeed's.
        run: of this rank.
    """

    def __init__(self, backend: Any, run: Run) -> None:
        self._backend, self._agreement = backend, CollectiveOrder(run, _FIX)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        return partial(self._call, name, value) if name in _COLLECTIVES else value

    def _call(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        values = (*args, *options.values())
        sizes = ", ".join(str(v.numel()) for v in values if isinstance(v, torch.Tensor))
        self._agreement.expect(f"{name} of {sizes} numbers of DeepSpeed")
        return function(*args, **options)
