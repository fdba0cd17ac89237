"""Support of torchmetrics' objects in core, as ``geartrain.metrics.objects.MetricLibrary`` defines.

torchmetrics is never imported here: if the script has not imported it, no object can exist.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain import TrainingError
from geartrain.plugin_api import map_tensors

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain.plugin_api import MetricOptions


def is_metric(thing: Any) -> bool:
    """True if it is a torchmetrics ``Metric``."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(thing, library.Metric)


def is_collection(thing: Any) -> bool:
    """True if it is a torchmetrics ``MetricCollection``."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(thing, library.MetricCollection)


def _is_multitask(thing: Any) -> bool:
    return isinstance(thing, getattr(sys.modules["torchmetrics"], "MultitaskWrapper", ()))


# --- called by core -------------------------------------------------------------------------------


def owns(thing: Any) -> bool:
    """True if it is a metric or a collection of metrics."""
    return is_metric(thing) or is_collection(thing)


def items(dictionary: Any) -> Iterable[tuple[str, Any]]:
    """Return the metrics of a collection or of a ``MultitaskWrapper`` by name.

    Return the metrics themselves, not the copies that compute groups would give, because logged
    metrics are reset.

    Raises:
        TrainingError: it is another metric.
    """
    if is_collection(dictionary):
        named: Iterable[tuple[str, Any]] = dictionary.items(keep_base=False, copy_state=False)
        return named
    if not _is_multitask(dictionary):
        name = type(dictionary).__name__
        raise TrainingError(
            f"self.log_dict({name}): only a MetricCollection and a MultitaskWrapper have metrics "
            "by name. Fix: self.log(name, metric)"
        )
    tasks = [
        [metric for _, metric in items(task)] if is_collection(task) else [task]
        for task in dictionary.values(flatten=False)
    ]
    return zip(dictionary.keys(), chain.from_iterable(tasks), strict=True)


def newest(name: str, thing: Any, options: MetricOptions) -> torch.Tensor | None:
    """Return the value of the metric's ``forward`` for the batch if it is logged ``on_step``.

    Raises:
        TrainingError: it is a collection, it is logged only on rank 0, or ``update`` was called
            in place of ``forward``.
    """
    if is_collection(thing) or _is_multitask(thing):
        raise TrainingError(
            f"self.log({name!r}): a {type(thing).__name__} has several values. "
            "Fix: self.log_dict(metric)"
        )
    if options.rank_zero_only:
        raise TrainingError(
            f"self.log({name!r}): a torchmetrics object is computed by all ranks together. "
            "Fix: leave out rank_zero_only"
        )
    if not options.on_step:
        return None
    value = thing._forward_cache
    if value is None:
        raise TrainingError(
            f"self.log({name!r}, ..., on_step=True): the metric was not called for this batch. "
            "Fix: self.metric(preds, target) in place of "
            "update(), or on_step=False, on_epoch=True"
        )
    if not isinstance(value, torch.Tensor):
        raise TrainingError(
            f"self.log({name!r}): the metric's value is {type(value).__name__}, not one number"
        )
    return value


def compute(run: Run, name: str, metric: Any) -> float:
    """Return a metric's value over all ranks.

    It is synced by the strategy's ``all_gather``, because torchmetrics' own sync supports only
    torch.distributed.

    Raises:
        TrainingError: the value is not one number.
    """
    if run.world.size > 1:
        # compute() returns a kept value without a sync. Ranks may not all have called it before.
        kept = torch.tensor([metric._computed is not None], dtype=torch.float64)
        if not run.hooks.log_sync(run=run, values=kept).all():
            metric._computed = None
    before = metric.dist_sync_fn, metric.distributed_available_fn
    if metric.dist_sync_fn is None:
        metric.dist_sync_fn = partial(_gather, run)
        metric.distributed_available_fn = lambda: run.world.size > 1
    try:
        value = metric.compute()
    finally:
        metric.dist_sync_fn, metric.distributed_available_fn = before
    if not isinstance(value, torch.Tensor | int | float) or (
        isinstance(value, torch.Tensor) and value.numel() != 1
    ):
        message = (
            f"has the shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"is {type(value).__name__}"
        )
        raise TrainingError(
            f"self.log({name!r}): the metric's value {message}, not one number. "
            "Fix: log the parts of its compute()"
        )
    return float(value)


def states(module: nn.Module) -> dict[str, Any]:
    """Return the states of a module's metrics since their last reset: path -> tensors or lists."""
    metrics = {
        path: part
        for path, part in module.named_modules()
        if is_metric(part) and part._update_count
    }
    return {
        path: {
            "updates": metric._update_count,
            "values": {name: getattr(metric, name) for name in metric._defaults},
        }
        for path, metric in metrics.items()
    }


def set_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore metrics from the result of :func:`states`."""
    for path, state in states.items():
        metric: Any = module.get_submodule(path)
        metric.reset()
        metric._update_count = state["updates"]
        for name, value in state["values"].items():
            setattr(
                metric,
                name,
                map_tensors(value, partial(torch.Tensor.to, device=metric.device, copy=True)),
            )


@contextmanager
def temporary_copies(module: nn.Module) -> Iterator[None]:
    """Replace a module's metrics by copies, so that discarded batches do not count in them."""
    before = find_metrics(module)
    copies = {id(metric): copy.deepcopy(metric, _detached(metric)) for _, metric in before}
    for path, metric in before:
        replace_metric(module, path, copies[id(metric)])
    try:
        yield
    finally:
        for path, metric in before:
            replace_metric(module, path, metric)


def _detached(metric: nn.Module) -> dict[int, torch.Tensor]:
    """Return a memo for ``deepcopy``, which cannot copy the tensors that have a graph."""
    found: list[torch.Tensor] = []
    map_tensors([vars(part) for part in metric.modules()], found.append)
    return {id(each): each.detach().clone() for each in found if each.grad_fn is not None}


def _gather(run: Run, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Gather a tensor of a metric's state, of each rank with other data; torchmetrics calls this.

    A rank without samples has an empty float tensor; it takes the type and shape of the others.
    """
    empty = run.hooks.log_sync(
        run=run, values=torch.tensor([tensor.numel() == 0], dtype=torch.float64)
    )[:, 0].tolist()
    if any(empty) and not all(empty):
        dtype, shape = run.hooks.broadcast(
            run=run, obj=(tensor.dtype, tensor.shape[1:]), src=empty.index(0.0)
        )
        if tensor.numel() == 0:
            tensor = torch.empty(0, *shape, dtype=dtype, device=tensor.device)
    rows = list(run.hooks.all_gather(run=run, tensor=tensor))
    return rows[:: run.world.size // run.world.data_size]


# --- the metrics of a module ----------------------------------------------------------------------


def find_metrics(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, metric) for a module's metrics and collections, without nested ones."""
    found: list[tuple[str, nn.Module]] = []
    if "torchmetrics" in sys.modules:
        inside: set[int] = set()
        for path, parent in module.named_modules():
            if id(parent) in inside:
                continue
            for name, child in parent._modules.items():
                if is_metric(child) or is_collection(child):
                    assert child is not None
                    inside.update(map(id, child.modules()))
                    found.append((f"{path}.{name}" if path else name, child))
    return found


def replace_metric(module: nn.Module, path: str, metric: nn.Module) -> None:
    """Replace the metric at a path that :func:`find_metrics` returned."""
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = metric
