"""Objects of torchmetrics in ``self.log`` of geartrain."""

from __future__ import annotations

from geartrain_torchmetrics._version import __version__
from geartrain_torchmetrics.objects import find_metrics, is_metric, replace_metric

__all__ = ["__version__", "find_metrics", "is_metric", "replace_metric"]
