"""Write the module's graph."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING

import torch

from geartrain import TrainingError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from geartrain import Run


def trace(run: Run, writer: SummaryWriter) -> None:
    """Write the graph of the module's ``forward`` for its ``example_input_array``.

    The run is not affected.

    Raises:
        TrainingError: the module has no ``example_input_array``.
        Exception: an error of ``forward`` or of torch's tracing.
    """
    module = run.module
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise TrainingError(
            "it has no example_input_array. "
            "Fix: self.example_input_array = torch.zeros(1, ...) in __init__"
        )
    # add_graph switches submodules in eval mode to train mode; restore their modes afterwards.
    modes = [(part, part.training) for part in module.modules()]
    devices = [run.device] if run.device.type == "cuda" else []
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            # torch prints an error that it also raises.
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # warnings about operations that tracing cannot record
            writer.add_graph(module, run.to_device(example))
    finally:
        for part, training in modes:
            part.training = training
