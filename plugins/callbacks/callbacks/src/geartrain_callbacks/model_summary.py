"""``model_summary``: a table of the model's layers before training."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback


class ModelSummary(PluginCallback):
    """Print the model's layers, their parameters and sizes on rank 0's stdout before ``fit``.

    A parameter that layers share counts in each of them and once in the total. A lazy parameter
    without a shape counts as 0.

    Args:
        max_depth: levels to list: 1 for the module's own layers, 2 for their layers too, -1 for
            all, 0 for the total only.

    Raises:
        UsageError: the depth is below -1.
    """

    errors_are_warnings = True

    def __init__(self, max_depth: int = 1) -> None:
        if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
            raise UsageError(
                f"model_summary: max_depth={max_depth!r} must be a whole number, at least -1 (all)."
            )
        self.max_depth = max_depth

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.world.rank or run.command != "fit":
            return
        # Imported here, so that other ranks and other callbacks do not pay for rich.
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", "type", "parameters", "trainable", "MiB")
        for column in table.columns[2:]:
            column.justify = "right"
        for name, layer in run.module.named_modules():
            depth = name.count(".") + 1
            if name and (self.max_depth == -1 or depth <= self.max_depth):
                table.add_row("  " * (depth - 1) + name, type(layer).__name__, *_figures(layer))
        table.add_section()
        table.add_row("total", type(run.module).__name__, *_figures(run.module))
        Console(markup=False).print(table)


def _figures(layer: nn.Module) -> tuple[str, str, str]:
    """Return parameters, trained parameters, and MiB of parameters and buffers."""
    parameters = [p for p in layer.parameters() if not is_lazy(p)]
    tensors: list[Any] = [*parameters, *(b for b in layer.buffers() if not is_lazy(b))]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(t.numel() * t.element_size() for t in tensors) / 2**20
    return f"{sum(p.numel() for p in parameters):,}", f"{trained:,}", f"{size:,.3f}"
