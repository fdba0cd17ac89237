"""self.log -> one packed flush.

A logged tensor stays on its device until the flush, which reads all of them at once: the only place where the CPU waits for the
GPU. A flush is two collectives: a header of fixed size (which metrics, how many, whether someone wants to stop), then one vector.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain import metric_objects, reductions
from geartrain.data import first_size
from geartrain.errors import TrainingError
from geartrain.hooks import fire

if TYPE_CHECKING:
    from geartrain.run import Run


@dataclass(frozen=True, slots=True)
class _Spec:
    """How a metric was asked to be logged; the same on every call."""

    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    #: The name of a reduction, or what a function of the user's own is called.
    reduce_fx: str
    sync_dist: bool
    rank_zero_only: bool


@dataclass(slots=True)
class _Metric:
    name: str
    spec: _Spec
    #: (value, weight) since the last fold, tensors still on their device.
    pending: list[tuple[Any, int]] = field(default_factory=list)
    #: The newest value and its weight; weight 0 when it was reported.
    last: tuple[float, int] = (0.0, 0)
    total: float = 0.0
    weight: int = 0
    #: The user's own reduction, and the values that it will get.
    function: Callable[[torch.Tensor], Any] | None = None
    values: list[float] = field(default_factory=list)
    #: The torchmetrics object that was logged; it keeps the epoch's value itself.
    source: Any = None

    def add(self, value: float, weight: int) -> None:
        self.last = (value, weight)
        if not self.spec.on_epoch or self.source is not None:
            return
        reduce_fx = self.spec.reduce_fx
        if self.function is not None:
            self.values.append(value)
        else:
            if self.weight == 0:
                self.total = reductions.START[reduce_fx]
            self.total = reductions.combine(reduce_fx, self.total, value * weight if reduce_fx == "mean" else value)
        self.weight += weight

    def forget(self) -> None:
        """Begin the next epoch."""
        self.total, self.weight, self.values, self.source = 0.0, 0, [], None


class Logs:
    """What was logged in the running stage and not reported yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics: dict[str, _Metric] = {}
        self._sized: tuple[Any, int] = (None, 1)
        #: Newest values of the metrics marked ``prog_bar``.
        self.prog_bar: dict[str, float] = {}
        #: Newest values of the metrics handed to loggers.
        self.logged: dict[str, float] = {}
        #: Whether any rank wanted to stop at the last flush.
        self.stop = False
        #: Whether what is logged now will be reported; after an epoch's end it would be lost.
        self.open = True

    # --- the hot path ----------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool = False,
        rank_zero_only: bool = False,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Keep one value until the next flush; see :meth:`geartrain.Module.log`."""
        run = self._run
        if not self.open:
            raise TrainingError(
                f"self.log({name!r}) comes after the metrics of the epoch are reported and would be lost. "
                "Fix: log it in on_train_epoch_end or on_validation_epoch_end"
            )
        in_step = run.stage == "train" and run.batch is not None
        spec = _Spec(
            prog_bar,
            logger,
            in_step if on_step is None else on_step,
            not in_step if on_epoch is None else on_epoch,
            reduce_fx if reduce_fx.__class__ is str else reductions.key(reduce_fx),
            sync_dist,
            rank_zero_only,
        )
        if (
            add_dataloader_idx
            and run.batch is not None
            and run.stage != "train"
            and len(run.loaders.get("validate" if run.stage == "sanity_check" else run.stage, ())) > 1
        ):
            name = f"{name}/dataloader_idx_{run.dataloader_idx}"
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._new(name, spec, reduce_fx)
        elif metric.spec != spec:
            raise TrainingError(
                f"self.log({name!r}) was called with other options before: {_difference(metric.spec, spec)}. Fix: use another name"
            )
        if rank_zero_only and run.world.rank != 0:
            return
        if isinstance(value, nn.Module):
            self._keep(metric, value)
        else:
            metric.pending.append((scalar(name, value), self._weight(batch_size)))

    def _new(self, name: str, spec: _Spec, reduce_fx: Any) -> _Metric:
        if not isinstance(name, str) or not name:
            raise TrainingError(f"self.log: a metric's name is a non-empty string, not {name!r}")
        if spec.rank_zero_only and spec.sync_dist:
            raise TrainingError(f"self.log({name!r}): rank_zero_only and sync_dist contradict each other. Fix: take one out")
        return _Metric(name, spec, function=reductions.check(name, reduce_fx))

    def _keep(self, metric: _Metric, value: nn.Module) -> None:
        """Keep a torchmetrics object until the end of the epoch."""
        if metric_objects.is_collection(value):
            raise TrainingError(f"self.log({metric.name!r}): a MetricCollection has several values. Fix: self.log_dict(collection)")
        if not metric_objects.is_metric(value):
            scalar(metric.name, value)
        if metric.spec.rank_zero_only:
            raise TrainingError(
                f"self.log({metric.name!r}): a torchmetrics object is computed by all ranks together. Fix: leave out rank_zero_only"
            )
        if metric.source is not None and metric.source is not value:
            raise TrainingError(f"self.log({metric.name!r}) was given another torchmetrics object before. Fix: a name for each")
        if metric.spec.on_step:
            metric.pending.append((scalar(metric.name, metric_objects.last_value(metric.name, value)), 1))
        metric.source = value

    def _weight(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return batch_size
        batch = self._run.batch
        if batch is None:
            return 1
        if self._sized[0] is not batch:
            self._sized = (batch, first_size(batch) or 1)
        return self._sized[1]

    # --- flushes ---------------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Read every pending value in one transfer and add it to its metric. The CPU waits for the GPU here."""
        pending = [(metric, value, weight) for metric in self._metrics.values() for value, weight in metric.pending]
        tensors = [value for _, value, _ in pending if isinstance(value, torch.Tensor)]
        read = iter(_read(tensors))
        for metric, value, weight in pending:
            metric.add(next(read) if isinstance(value, torch.Tensor) else value, weight)
        for metric in self._metrics.values():
            metric.pending.clear()
        self._sized = (None, 1)  # lets go of the batch

    def flush(self) -> None:
        """Report the newest values of what is logged ``on_step``, and agree with the other ranks whether to stop."""
        self.fold()
        found = {m.name: m.last for m in self._metrics.values() if m.spec.on_step and m.last[1]}
        totals = {name: (value * weight if self._reduction(name) == "mean" else value, weight) for name, (value, weight) in found.items()}
        values = self._reduce(totals, {name: [value] for name, (value, _) in found.items()})
        for name in found:
            self._metrics[name].last = (0.0, 0)
        self._report(values, "_step")

    def end_epoch(self) -> dict[str, float]:
        """Report and forget what is logged ``on_epoch``.

        Returns:
            The values by their reported names.
        """
        self.flush()
        seen = [m for m in self._metrics.values() if m.spec.on_epoch and m.weight]
        values = self._reduce({m.name: (m.total, m.weight) for m in seen}, {m.name: m.values for m in seen})
        objects = {m.name: (m.source, m.spec.on_epoch) for m in self._metrics.values() if m.source is not None}
        values.update(metric_objects.end_epoch(self._run, objects))
        reported = self._report(values, "_epoch")
        for metric in self._metrics.values():
            metric.forget()
        self.open = False
        return reported

    def _reduction(self, name: str) -> str:
        return self._metrics[name].spec.reduce_fx

    def _reduce(self, totals: Mapping[str, tuple[float, int]], samples: Mapping[str, list[float]]) -> dict[str, float]:
        """Each metric's value; those with ``sync_dist`` over all ranks. ``totals`` are sums for a mean, else reduced values; ``samples``
        what a function of the user's own gets."""
        mine = {name: (self._reduction(name), total, weight) for name, (total, weight) in totals.items()}
        values = {
            name: reductions.value(reduce_fx, [total], [weight])
            if (function := self._metrics[name].function) is None
            else reductions.apply(name, function, samples[name])
            for name, (reduce_fx, total, weight) in mine.items()
        }
        synced = {name: mine[name] for name in sorted(mine) if self._metrics[name].spec.sync_dist}
        values.update(self._sync(synced, samples))
        return values

    def _sync(self, mine: dict[str, tuple[str, float, int]], samples: Mapping[str, list[float]]) -> dict[str, float]:
        run = self._run
        if run.world.size == 1:
            self.stop = run.should_stop
            return {}  # nothing to agree on; the values are this rank's
        keys = {name: self._metrics[name].spec for name in mine}
        digest = zlib.crc32(repr(sorted(keys.items())).encode())
        header = run.hooks.log_sync(run=run, values=torch.tensor([digest, len(keys), run.should_stop], dtype=torch.float64))
        self.stop = bool(header[:, 2].any())
        if bool((header[:, :2] != header[0, :2]).any()):
            keys = self._agree(keys)
        if not keys:
            return {}
        nothing = (0.0, 0)
        vector = [number for name in keys for number in (mine[name][1:] if name in mine else nothing)]
        table = run.hooks.log_sync(run=run, values=torch.tensor(vector, dtype=torch.float64)).tolist()
        values = {
            name: reductions.value(spec.reduce_fx, [row[2 * i] for row in table], [row[2 * i + 1] for row in table])
            for i, (name, spec) in enumerate(keys.items())
        }
        own = [name for name, spec in keys.items() if spec.reduce_fx not in reductions.NAMED]
        return values | self._sync_functions(own, samples) if own else values

    def _sync_functions(self, names: list[str], samples: Mapping[str, list[float]]) -> dict[str, float]:
        """What functions of the user's own make of every rank's values, rank by rank."""
        run, mine = self._run, [samples.get(name, []) for name in names]
        counts = run.hooks.log_sync(run=run, values=torch.tensor([len(values) for values in mine], dtype=torch.float64)).long().tolist()
        flat = torch.tensor([value for values in mine for value in values], dtype=torch.float64)
        ranks = [part.tolist() for part in run.hooks.all_gather(run=run, tensor=flat)]
        values = []
        for i, name in enumerate(names):
            every = [value for rank, count in zip(ranks, counts, strict=True) for value in rank[sum(count[:i]) : sum(count[: i + 1])]]
            function = self._metrics[name].function
            # A rank without samples of its own never saw the function, which need not pickle: it takes the value of one that did.
            values += [0.0, 0.0] if function is None else [reductions.apply(name, function, every), 1.0]
        told = run.hooks.log_sync(run=run, values=torch.tensor(values, dtype=torch.float64)).tolist()
        return {name: next(row[2 * i] for row in told if row[2 * i + 1]) for i, name in enumerate(names)}

    def _agree(self, keys: dict[str, _Spec]) -> dict[str, _Spec]:
        """The keys to sync when ranks differ: a rank without any takes the others', and so does one without a batch of its own for
        those that it lacks (it logs what ``on_validation_epoch_end`` logs, and nothing else); any other difference is an error."""
        run = self._run
        told = [run.hooks.broadcast(run=run, obj=(keys, self._is_idle()), src=rank) for rank in range(run.world.size)]
        by_rank, idle = [theirs for theirs, _ in told], [is_idle for _, is_idle in told]
        first = min((i for i, theirs in enumerate(by_rank) if theirs), key=lambda i: (idle[i], i))
        for rank, theirs in enumerate(by_rank):
            mine, others = {*theirs.items()}, {*by_rank[first].items()}
            odd = sorted(mine - others if idle[rank] or not theirs else mine ^ others, key=str)
            if odd:
                raise TrainingError(
                    f"ranks {first} and {rank} logged different metrics with sync_dist: {odd[0][0]!r} is not the same on both. "
                    "Fix: log the same names on every rank, or rank_zero_only=True"
                )
        for name, spec in by_rank[first].items():
            self._metrics.setdefault(name, _Metric(name, spec))
        return dict(by_rank[first])

    def _is_idle(self) -> bool:
        """Whether this rank evaluates without a batch of its own."""
        stage = "validate" if self._run.stage == "sanity_check" else self._run.stage
        batches = self._run.batches.get(stage, [])
        return stage != "train" and bool(batches) and all(count == 0 for count in batches)

    def _report(self, values: Mapping[str, float], suffix: str) -> dict[str, float]:
        run = self._run
        shown, logged = {}, {}
        for name, value in values.items():
            spec = self._metrics[name].spec if name in self._metrics else None
            both = spec is not None and spec.on_step and spec.on_epoch
            key = _with_suffix(name, suffix) if both else name
            run.metrics[name] = run.metrics[key] = shown[key] = value
            if spec is not None and spec.prog_bar:
                self.prog_bar[name] = value
            if spec is not None and spec.logger:
                logged[key] = value
        self.logged.update(logged)
        if logged and run.world.rank == 0 and run.stage != "sanity_check":
            fire(run.hooks.log_metrics, run=run, metrics=logged, step=run.step)
        return shown

    # --- scopes ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, keep: bool = True) -> Iterator[None]:
        """An evaluation's own metrics, apart from those of the epoch around it; with ``keep=False`` nothing of them stays."""
        run, outer, was_open = self._run, self._metrics, self.open
        before = dict(run.metrics), dict(self.prog_bar), dict(self.logged)
        self._metrics, self.open = {}, True
        try:
            yield
        finally:
            self._metrics, self.open = outer, was_open
            if not keep:
                run.metrics, self.prog_bar, self.logged = before


def _with_suffix(name: str, suffix: str) -> str:
    metric, index, loader = name.partition("/dataloader_idx_")
    return metric + suffix + index + loader


def scalar(name: str, value: Any) -> Any:
    """What is logged, checked: a float, or a tensor of one element on its device.

    Raises:
        TrainingError: neither.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TrainingError(
                f"self.log({name!r}): a metric is one number, and this tensor has the shape {list(value.shape)}. Fix: .mean()?"
            )
        # A copy: the tensor may be changed in place before it is read, as a running total is.
        return value.detach().clone()
    if isinstance(value, Number) and not isinstance(value, complex):
        return float(value)  # type: ignore[arg-type]
    raise TrainingError(f"self.log({name!r}): a metric is a number or a tensor of one element, not {type(value).__name__}")


def _read(tensors: list[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        tensors = [t.cpu().double() for t in tensors]
    stacked: list[float] = torch.stack([t.reshape(()) for t in tensors]).cpu().double().tolist()
    return stacked


def _difference(a: _Spec, b: _Spec) -> str:
    return ", ".join(f"{n}={getattr(a, n)!r} then, {getattr(b, n)!r} now" for n in _Spec.__slots__ if getattr(a, n) != getattr(b, n))
