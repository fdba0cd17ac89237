"""torchmetrics objects on the replicas: every part updates the module's objects, in order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from geartrain import TrainingError
from geartrain.plugin_api import map_tensors, move
from geartrain_callbacks.torchmetrics_objects import find_metrics, is_metric, replace_metric

#: torchmetrics' wrapper that keeps a window of updates. This module never imports torchmetrics.
_WINDOW = ("torchmetrics.wrappers.running", "Running")


class Seen(NamedTuple):
    """A metric that a part logged."""

    metric: Any
    #: The arguments of the part's last call; ``None`` if the part only called ``update``.
    call: tuple[tuple[Any, ...], dict[str, Any]] | None


class PartMetrics:
    """The module's metrics while the parts of one batch run, one after another.

    Args:
        network: the replicated module.
        devices: one per part; the metrics are on the first.
    """

    def __init__(self, network: nn.Module, devices: Sequence[torch.device]) -> None:
        self._places, self._devices = find_metrics(network), devices
        #: The metrics and their submodules, by id: a metric's hash changes with its state.
        self.modules = {
            id(module): module for _, metric in self._places for module in metric.modules()
        }
        #: (part, id of the metric) -> its last arguments.
        self._calls: dict[tuple[int, int], Any] = {}
        self._part = 0

    def put_into(self, replica: nn.Module) -> None:
        """Replace the copies in a replica by the module's metrics."""
        for path, metric in self._places:
            replace_metric(replica, path, metric)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the metrics' arguments and move them to their device, inside the block."""
        with ExitStack() as stack:
            for metric in filter(is_metric, self.modules.values()):
                stack.callback(metric.register_forward_hook(self._called, with_kwargs=True).remove)
                if self._devices[0].type != "cpu":
                    update = metric.update
                    stack.callback(setattr, metric, "update", update)
                    metric.update = partial(_update, update, self._devices[0])  # type: ignore[assignment]
            yield

    def begin(self, part: int) -> None:
        """Set the part that runs next."""
        self._part = part

    def seen(self, name: str, metric: nn.Module) -> Seen:
        """Return the value that the running part logs for a metric.

        Raises:
            TrainingError: the metric is no attribute of the module.
        """
        if id(metric) not in self.modules:
            raise TrainingError(
                f"self.log({name!r}): the metric is no attribute of the module, so the parts of a "
                "batch do not share it. Fix: make it an attribute of the module"
            )
        return Seen(metric, self._calls.get((self._part, id(metric))))

    def _called(
        self, metric: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        self._calls[self._part, id(metric)] = args, kwargs
        device = self._devices[self._part]
        return map_tensors(output, lambda tensor: tensor.to(device))


def whole_batch(
    seen: Sequence[Seen], device: torch.device, copies: dict[str, tuple[Any, Any]], name: str
) -> None:
    """Set the value of a metric's last ``forward`` to that of the whole batch.

    Each part left its own value there. A reset copy gets the arguments of all parts, because the
    mean of the parts' values would be wrong for most metrics.

    Args:
        seen: the value that each part logged.
        device: device of the metric.
        copies: name -> a metric and its copy, from earlier batches. A metric may hold all samples
            of the epoch, so it is not copied for each batch.
        name: the name under which the module logs the metric.
    """
    metric, calls = seen[0].metric, [call.call for call in seen if call.call is not None]
    if len(calls) < len(seen):
        metric._forward_cache = None  # core's error says that the metric was not called
        return
    kept, same = copies.get(name, (None, None))
    if kept is not metric:
        same = copy.deepcopy(metric)
        same.sync_on_compute = False
        copies[name] = metric, same
    same.reset()
    for args, kwargs in calls:
        _update(same.update, device, *args, **kwargs)
    metric._forward_cache = same.compute()


def refuse_metrics(network: nn.Module, label: str, nodes: bool) -> None:
    """Raise for metrics whose value would differ from that in one process.

    Args:
        network: the module to replicate.
        label: the strategy, for messages.
        nodes: true if there are several ranks.

    Raises:
        TrainingError: a metric cannot be used; the message names the first.
    """
    for path, metric in find_metrics(network):
        for module in filter(is_metric, metric.modules()):
            message = f"{label}: {path.removeprefix('module.')} ({type(module).__name__})"
            if any((cls.__module__, cls.__name__) == _WINDOW for cls in type(module).__mro__):
                raise TrainingError(
                    f"{message} keeps a window of updates, but each part of a batch is one update. "
                    "Fix: --strategy ddp"
                )
            if nodes and module.dist_sync_on_step:
                raise TrainingError(
                    f"{message} has dist_sync_on_step=True, but nodes may have different "
                    "numbers of parts. Fix: remove dist_sync_on_step, or --strategy ddp"
                )


def _update(update: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
    update(*move(args, device), **move(kwargs, device))
