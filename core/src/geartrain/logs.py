"""self.log -> one packed flush.

A logged tensor stays on its device until the flush, which reads all of them at once: the only place where the CPU waits for the
GPU. A flush is two collectives: a header of fixed size (which metrics, how many, whether someone wants to stop), then one vector.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data import first_size
from geartrain.errors import TrainingError, nearest
from geartrain.hooks import fire

if TYPE_CHECKING:
    from geartrain.run import Run

_REDUCTIONS = ("mean", "sum", "min", "max")
#: What an accumulator starts from: nothing added, nothing seen.
_START = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
_FUNCTIONS = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", sum: "sum", min: "min", max: "max"}


@dataclass(frozen=True, slots=True)
class _Spec:
    """How a metric was asked to be logged; the same on every call."""

    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
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

    def add(self, value: float, weight: int) -> None:
        self.last = (value, weight)
        if not self.spec.on_epoch:
            return
        if self.weight == 0:
            self.total = _START[self.spec.reduce_fx]
        self.total = _combine(self.spec.reduce_fx, self.total, value * weight if self.spec.reduce_fx == "mean" else value)
        self.weight += weight


def _combine(reduce_fx: str, a: float, b: float) -> float:
    if reduce_fx == "min":
        return b if b != b else min(a, b)  # NaN must win: min() would drop it silently
    if reduce_fx == "max":
        return b if b != b else max(a, b)
    return a + b


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
            _FUNCTIONS.get(reduce_fx, reduce_fx),
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
            metric = self._metrics[name] = self._new(name, spec)
        elif metric.spec != spec:
            raise TrainingError(
                f"self.log({name!r}) was called with other options before: {_difference(metric.spec, spec)}. Fix: use another name"
            )
        if rank_zero_only and run.world.rank != 0:
            return
        metric.pending.append((_scalar(name, value), self._weight(batch_size)))

    def _new(self, name: str, spec: _Spec) -> _Metric:
        if not isinstance(name, str) or not name:
            raise TrainingError(f"self.log: a metric's name is a non-empty string, not {name!r}")
        if spec.reduce_fx not in _REDUCTIONS:
            hint = nearest(spec.reduce_fx, _REDUCTIONS) if isinstance(spec.reduce_fx, str) else f"Known: {', '.join(_REDUCTIONS)}."
            raise TrainingError(f"self.log({name!r}, reduce_fx={spec.reduce_fx!r}): unknown reduction. {hint}")
        if spec.rank_zero_only and spec.sync_dist:
            raise TrainingError(f"self.log({name!r}): rank_zero_only and sync_dist contradict each other. Fix: take one out")
        return _Metric(name, spec)

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
        values = self._reduce(totals)
        for name in found:
            self._metrics[name].last = (0.0, 0)
        self._report(values, "_step")

    def end_epoch(self) -> dict[str, float]:
        """Report and forget what is logged ``on_epoch``.

        Returns:
            The values by their reported names.
        """
        self.flush()
        values = self._reduce({m.name: (m.total, m.weight) for m in self._metrics.values() if m.spec.on_epoch and m.weight})
        reported = self._report(values, "_epoch")
        for metric in self._metrics.values():
            metric.total, metric.weight = 0.0, 0
        self.open = False
        return reported

    def _reduction(self, name: str) -> str:
        return self._metrics[name].spec.reduce_fx

    def _reduce(self, totals: Mapping[str, tuple[float, int]]) -> dict[str, float]:
        """Each metric's value; those with ``sync_dist`` over all ranks. ``totals`` are sums for a mean, else reduced values."""
        mine = {name: (self._reduction(name), total, weight) for name, (total, weight) in totals.items()}
        values = {name: _value(reduce_fx, [total], [weight]) for name, (reduce_fx, total, weight) in mine.items()}
        synced = {name: mine[name] for name in sorted(mine) if self._metrics[name].spec.sync_dist}
        values.update(self._sync(synced))
        return values

    def _sync(self, mine: dict[str, tuple[str, float, int]]) -> dict[str, float]:
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
        return {
            name: _value(spec.reduce_fx, [row[2 * i] for row in table], [row[2 * i + 1] for row in table])
            for i, (name, spec) in enumerate(keys.items())
        }

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


def _value(reduce_fx: str, totals: list[float], weights: list[float]) -> float:
    """One metric's value from every rank's total; ranks of weight 0 have seen nothing."""
    seen = [total for total, weight in zip(totals, weights, strict=True) if weight]
    if not seen:
        return float("nan")
    combined = seen[0]
    for total in seen[1:]:
        combined = _combine(reduce_fx, combined, total)
    return combined / sum(weights) if reduce_fx == "mean" else combined


def _with_suffix(name: str, suffix: str) -> str:
    metric, index, loader = name.partition("/dataloader_idx_")
    return metric + suffix + index + loader


def _scalar(name: str, value: Any) -> Any:
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
