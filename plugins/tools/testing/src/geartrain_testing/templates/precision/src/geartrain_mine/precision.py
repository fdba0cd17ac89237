"""Run step methods under autocast in bfloat16."""

from __future__ import annotations

import torch
from geartrain.callbacks import MixedPrecision


class MinePrecision(MixedPrecision):
    """Step methods run under autocast in bfloat16; weights and gradients stay in float32.

    ``TruePrecision`` is the base class for one dtype of weights and batches, ``ScaledPrecision``
    the one for float16, which needs a gradient scaler.
    """

    def __init__(self) -> None:
        label = "geartrain-mine[mine]"  # for errors
        super().__init__(label, torch.bfloat16)
