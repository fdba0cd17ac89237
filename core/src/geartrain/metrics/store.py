"""self.log -> one packed flush.

A logged tensor stays on its device until the flush, which reads all of them at once: the only place where the CPU waits for the
GPU. One that is on the CPU is read at once, which costs less than a copy.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain.data.loaders import BatchSizer
from geartrain.errors import TrainingError, printable
from geartrain.metrics import reductions
from geartrain.metrics.local import LocalMetric, MetricOptions
from geartrain.metrics.objects import libraries, library_of, refuse_unknown

if TYPE_CHECKING:
    from geartrain.loop.run import Run


@dataclass(slots=True)
class _Metric:
    name: str
    spec: MetricOptions
    #: With which options it was logged last; they need not be looked at again.
    asked: tuple[Any, ...] = ()
    #: (value, weight) since the last ``drain``, tensors still on their device; the newest alone where no epoch's value is wanted.
    pending: list[tuple[Any, int]] = field(default_factory=list)
    #: Optimizer steps that were done, with the one in which it was logged, when it was logged last.
    step: int = 0
    #: The newest value and its weight; weight 0 when it was reported.
    last: tuple[float, int] = (0.0, 0)
    #: True if ``run.metrics`` lacks it.
    unread: bool = False
    total: float = 0.0
    weight: int = 0
    #: The user's own reduction, and the values that it will get.
    function: Callable[[torch.Tensor], Any] | None = None
    values: list[float] = field(default_factory=list)
    #: The object of another library that was logged; it keeps the epoch's value itself.
    source: Any = None

    def add(self, value: float, weight: int) -> None:
        self.last, self.unread = (value, weight), True
        if not self.spec.on_epoch or self.source is not None:
            return
        reduce_fx = self.spec.reduce_fx
        if self.function is not None:
            self.values.append(value)
        else:
            if self.weight == 0:
                self.total = reductions.START[reduce_fx]
            self.total = reductions.combine(
                reduce_fx, self.total, value * weight if reduce_fx == "mean" else value
            )
        self.weight += weight

    def newest(self) -> LocalMetric:
        """The newest value alone."""
        value, weight = self.last
        return LocalMetric(
            self.spec,
            value * weight if self.spec.reduce_fx == "mean" else value,
            weight,
            self.function,
            [value],
        )

    def forget(self) -> None:
        """Begin the next epoch."""
        self.total, self.weight, self.values, self.source = 0.0, 0, [], None


class MetricStore:
    """The values that were logged in the running stage and not reported yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics: dict[str, _Metric] = {}
        self._sized: tuple[Any, int] = (None, 1)
        #: By stage and loader.
        self._sizers: dict[tuple[str, int], BatchSizer] = {}
        #: Newest values of the metrics marked ``prog_bar``.
        self.prog_bar: dict[str, float] = {}
        #: Newest values of the metrics handed to loggers.
        self.logged: dict[str, float] = {}
        #: In which epoch and after how many steps the newest value of each metric was logged.
        self.when: dict[str, tuple[int, int]] = {}
        #: True if any rank wanted to stop at the last flush.
        self.stop = False
        #: True if values logged now will be reported; after an epoch's end they would be lost.
        self.open = True
        #: The metrics of the stages around the running evaluation, outermost first.
        self._around: list[dict[str, _Metric]] = []

    # --- the hot path ----------------------------------------------------------------------------------------------------

    def items_of(self, dictionary: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        """Return what ``log_dict`` logs."""
        library = library_of(dictionary)
        return dictionary.items() if library is None else library.items(dictionary)

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
        batch = run.batch
        in_step = batch is not None and run.stage == "train"
        if add_dataloader_idx and not in_step:
            name = self._of_loader(name)
        # All that is called once a step is written out here: called seldom, Python's own calls cost three times what a benchmark says.
        asked = (in_step, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        metric = self._metrics.get(name)
        if metric is None or metric.asked != asked or not self.open:
            metric = self._check(name, asked)
        if rank_zero_only and run.world.rank != 0:
            return
        metric.step = run.step + in_step
        if value.__class__ is not float:
            if isinstance(value, nn.Module):
                self._keep(metric, value)
                return
            value = scalar(name, value)
        if batch_size is None:
            batch_size = self._sized[1] if self._sized[0] is batch else self._size(batch)
        elif batch_size.__class__ is not int or batch_size < 0:
            batch_size = check_batch_size(name, batch_size)
        if metric.spec.on_epoch:
            metric.pending.append((value, batch_size))
        else:
            metric.pending = [(value, batch_size)]  # they are not read before

    def _of_loader(self, name: str) -> str:
        """Return a metric's name, with the number of its loader if there are several."""
        run = self._run
        if run.batch is None or run.stage == "train":
            return name
        return (
            f"{name}/dataloader_idx_{run.dataloader_idx}"
            if len(run.current_stage.loaders) > 1
            else name
        )

    def _check(self, name: str, asked: tuple[Any, ...]) -> _Metric:
        """Return the metric of this name; make it, after all checks, if it does not exist."""
        in_step, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only = asked
        if not self.open:
            raise TrainingError(
                f"self.log({name!r}) comes after the metrics of the epoch are reported and would be lost. "
                "Fix: log it in on_train_epoch_end or on_validation_epoch_end"
            )
        spec = MetricOptions(
            prog_bar,
            logger,
            in_step if on_step is None else on_step,
            not in_step if on_epoch is None else on_epoch,
            reductions.key(reduce_fx),
            sync_dist,
            rank_zero_only,
        )
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._new(name, spec, reduce_fx)
        elif metric.spec != spec:
            raise TrainingError(
                f"self.log({name!r}) was called with other options before: {_difference(metric.spec, spec)}. Fix: use another name"
            )
        elif metric.function is None:
            metric.function = reductions.check(name, reduce_fx)  # of one that was loaded
        metric.asked = asked
        return metric

    def _new(self, name: str, spec: MetricOptions, reduce_fx: Any) -> _Metric:
        check_name(name)
        if not spec.on_step and not spec.on_epoch:
            raise TrainingError(
                f"self.log({name!r}) would be reported never: on_step and on_epoch are False, given or by default here. "
                "Fix: on_step=True for each step, or on_epoch=True for the epoch"
            )
        if spec.rank_zero_only and spec.sync_dist:
            raise TrainingError(
                f"self.log({name!r}): rank_zero_only and sync_dist contradict each other. Fix: take one out"
            )
        return _Metric(name, spec, function=reductions.check(name, reduce_fx))

    def _keep(self, metric: _Metric, value: nn.Module) -> None:
        """Keep another library's object until the end of the epoch."""
        library = library_of(value)
        if library is None:
            refuse_unknown(metric.name, value)
            scalar(metric.name, value)  # raises
            return
        newest = library.newest(metric.name, value, metric.spec)
        if metric.source is not None and metric.source is not value:
            raise TrainingError(
                f"self.log({metric.name!r}) was given another {type(value).__name__} before. Fix: a name for each"
            )
        if newest is not None:
            metric.pending.append((scalar(metric.name, newest), 1))
        metric.source = value

    def _size(self, batch: Any) -> int:
        """Return a batch's weight in a mean. It is found once, however many metrics are logged of the batch."""
        run = self._run
        sizer = self._sizers.get((run.stage, run.dataloader_idx))
        if sizer is None:
            # In a Session a logged value belongs to no batch.
            loader = (
                None if run.mode == "session" else run.current_stage.loaders[run.dataloader_idx]
            )
            sizer = self._sizers[run.stage, run.dataloader_idx] = BatchSizer(
                loader, run.world.rank == 0
            )
        size = 1 if batch is None else sizer.size(batch) or 1
        self._sized = (batch, size)
        return size

    # --- flushes ---------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Read every pending value in one transfer and add it to its metric. The CPU waits for the GPU here."""
        self._drain(self._metrics)

    def _drain(self, metrics: dict[str, _Metric]) -> None:
        pending = [
            (metric, value, weight)
            for metric in metrics.values()
            for value, weight in metric.pending
        ]
        tensors = [value for _, value, _ in pending if isinstance(value, torch.Tensor)]
        read = iter(_read(tensors))
        for metric, value, weight in pending:
            metric.add(next(read) if isinstance(value, torch.Tensor) else value, weight)
        for metric in metrics.values():
            metric.pending.clear()
        self._sized = (None, 1)  # releases the batch

    def flush(self) -> None:
        """Report the newest values of metrics logged ``on_step``, and agree with the other ranks whether to stop."""
        self.drain()
        shares = {
            m.name: m.newest() for m in self._metrics.values() if m.spec.on_step and m.last[1]
        }
        for name in shares:
            self._metrics[name].last = (0.0, 0)
        self._report(self._reduce(shares), "_step")

    def end_epoch(self) -> dict[str, float]:
        """Report and forget the metrics logged ``on_epoch``.

        Returns:
            The values by their reported names.
        """
        values, objects = self._epoch_values()
        self._warn_of_one_rank(
            [
                m.name
                for m in self._metrics.values()
                if m.weight and not m.spec.sync_dist and not m.spec.rank_zero_only
            ]
        )
        reported = self._report(values, "_epoch")
        for metric in objects:
            metric.reset()
        for metric in self._metrics.values():
            metric.forget()
        self.open = False
        return reported

    def refresh_epoch(self) -> None:
        """Update ``run.metrics`` with the metrics logged ``on_epoch``, for the hooks of the epoch's end, which may log more."""
        for name, value in self._epoch_values()[0].items():
            metric = self._metrics.get(name)
            self._put(
                name, None if metric is None else metric.spec, "_epoch", value, self._run.step
            )

    def _epoch_values(self) -> tuple[dict[str, float], list[Any]]:
        """Reduce the metrics logged ``on_epoch``; return the values by name, and the objects to reset."""
        self.flush()
        # A metric that was loaded has no user's function until it is logged again. Until then it is left out.
        seen = [
            m
            for m in self._metrics.values()
            if m.spec.on_epoch and m.weight and (m.function or m.spec.reduce_fx in reductions.NAMED)
        ]
        values = self._reduce(
            {m.name: LocalMetric(m.spec, m.total, m.weight, m.function, m.values) for m in seen}
        )
        objects: list[Any] = []
        kept = {
            m.name: (m.source, m.spec.on_epoch)
            for m in self._metrics.values()
            if m.source is not None
        }
        for library in libraries().values():
            computed, theirs = library.end_epoch(
                self._run, {name: one for name, one in kept.items() if library.owns(one[0])}
            )
            values, objects = values | computed, objects + theirs
        for metric in self._metrics.values():
            metric.step = self._run.step  # of the whole epoch
        return values, objects

    def _warn_of_one_rank(self, names: Sequence[str]) -> None:
        """Warn that an evaluation's metrics cover only a part of the data."""
        run = self._run
        if (
            names
            and run.world.size > 1
            and run.world.rank == 0
            and run.stage in ("validate", "test")
        ):
            warnings.warn(
                f"{run.stage}: {', '.join(names)} is of rank 0's part of the data alone. Fix: self.log(..., sync_dist=True) for all of it, "
                "or rank_zero_only=True if only rank 0 computes it",
                stacklevel=2,
            )

    def _reduce(self, shares: Mapping[str, LocalMetric]) -> dict[str, float]:
        """Return each metric's value; those with ``sync_dist`` over all ranks, which agree here whether to stop."""
        values, specs, self.stop = self._values(shares)
        for name, spec in specs.items():
            self._metrics.setdefault(name, _Metric(name, spec, step=self._run.step))
        return values

    def _values(
        self, shares: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        """Return the values; how those with ``sync_dist`` were logged, also those that only other ranks logged; and whether to stop."""
        synced, specs, stop = self._run.ranks.reduce(
            self._run, {name: share for name, share in shares.items() if share.spec.sync_dist}
        )
        values = {
            name: synced[name] if share.spec.sync_dist else share.value(name)
            for name, share in shares.items()
        }
        return values | synced, specs, stop

    def _report(self, values: Mapping[str, float], suffix: str) -> dict[str, float]:
        run = self._run
        shown, logged = {}, {}
        for name, value in values.items():
            metric = self._metrics.get(name)
            spec = None if metric is None else metric.spec
            key = self._put(name, spec, suffix, value, run.step if metric is None else metric.step)
            shown[key] = value
            if spec is not None and spec.prog_bar:
                self.prog_bar[name] = value
            if spec is not None and spec.logger:
                logged[key] = value
        self.logged.update(logged)
        if logged and run.world.rank == 0 and run.stage != "sanity_check":
            run.hooks.log_metrics(run=run, metrics=logged, step=run.step)
        return shown

    # --- between flushes -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Update ``run.metrics`` with the values that this rank has logged. The CPU waits for the GPU here, and no rank for another."""
        for name, metric in self._not_reported().items():
            if metric.unread:
                self._put(name, metric.spec, "_step", metric.newest().value(name), metric.step)
                metric.unread = False

    def refresh(self, *names: str) -> None:
        """Bring these metrics in ``run.metrics`` up to date, those with ``sync_dist`` over all ranks, which all call it in the same place.

        Raises:
            TrainingError: ranks logged different metrics.
        """
        run, found = self._run, self._not_reported(names)
        values, specs, _ = self._values({name: metric.newest() for name, metric in found.items()})
        for name, value in values.items():
            metric = found.get(name)
            spec, step = (specs[name], run.step) if metric is None else (metric.spec, metric.step)
            self._put(name, spec, "_step", value, step)
        for metric in found.values():
            metric.unread = False

    def newest(self, name: str) -> tuple[float | None, tuple[int, int] | None, list[str]]:
        """Return a metric's newest value, the epoch and the step that it belongs to, and what else was logged if there is none.

        It is reduced if it is logged with ``sync_dist``, otherwise rank 0's; the same on all ranks, which all call it in the same place.
        """
        run = self._run
        self.refresh(name)
        value = run.reported.get(name)
        found = value, self.when.get(name), sorted(run.metrics) if value is None else []
        return found if run.world.size == 1 else run.hooks.broadcast(run=run, obj=found, src=0)

    def _not_reported(self, names: Collection[str] = ()) -> dict[str, _Metric]:
        """Return values logged ``on_step`` and not reported yet, read now; only these, if names are given. What the running evaluation logs
        under a name hides what training did."""
        known: dict[str, _Metric] = {}
        for metrics in (*self._around, self._metrics):
            known |= metrics
        found = {
            name: metric
            for name, metric in known.items()
            if metric.spec.on_step
            and (metric.pending or metric.last[1])
            and (
                not names
                or name in names
                or (metric.spec.on_epoch and _with_suffix(name, "_step") in names)
            )
        }
        if found:
            self._drain(found)
        return found

    def _put(
        self, name: str, spec: MetricOptions | None, suffix: str, value: float, step: int
    ) -> str:
        """Keep a newest value; the name under which it is reported."""
        run = self._run
        key = (
            _with_suffix(name, suffix)
            if spec is not None and spec.on_step and spec.on_epoch
            else name
        )
        run.reported[name] = run.reported[key] = value
        self.when[name] = self.when[key] = (run.epoch, step)
        return key

    # --- scopes ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, keep: bool = True) -> Iterator[None]:
        """An evaluation's own metrics, apart from those of the epoch around it; with ``keep=False`` nothing of them stays."""
        run, outer, was_open = self._run, self._metrics, self.open
        before = dict(run.reported), dict(self.prog_bar), dict(self.logged), dict(self.when)
        self._metrics, self.open = {}, True
        self._around.append(outer)
        try:
            yield
        finally:
            self._around.pop()
            self._metrics, self.open = outer, was_open
            if not keep:
                run.reported, self.prog_bar, self.logged, self.when = before

    # --- its state -------------------------------------------------------------------------------------------------------

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        """Return the reported values and, within an epoch, the values logged so far, as plain values. The CPU waits for the GPU here.

        What other libraries' objects have seen is theirs.
        """
        metrics = self._around[0] if self._around else self._metrics
        if within_epoch:
            self._drain(metrics)
        epoch = {
            m.name: [list(astuple(m.spec)), list(m.last), m.total, m.weight, list(m.values)]
            for m in metrics.values()
        }
        reported: dict[str, dict[str, Any]] = {
            "metrics": self._run.reported,
            "logged": self.logged,
            "prog_bar": self.prog_bar,
            "when": self.when,
        }
        return {
            **{name: dict(values) for name, values in reported.items()},
            "epoch": epoch if within_epoch else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the reported values."""
        self._run.reported.update(state["metrics"])
        self.logged.update(state["logged"])
        self.prog_bar.update(state["prog_bar"])
        self.when.update(state["when"])

    def resume_epoch(self, state: Mapping[str, Any]) -> None:
        """Restore the values that the epoch had logged, if the state was saved within it; those logged since this one began are dropped."""
        if state["epoch"] is not None:
            self._metrics = {
                name: _Metric(
                    name,
                    MetricOptions(*spec),
                    last=(last[0], last[1]),
                    unread=True,
                    total=total,
                    weight=weight,
                    values=list(values),
                )
                for name, (spec, last, total, weight, values) in state["epoch"].items()
            }


def _with_suffix(name: str, suffix: str) -> str:
    metric, index, loader = name.partition("/dataloader_idx_")
    return metric + suffix + index + loader


def check_name(name: Any) -> None:
    """Refuse a name that no metric can have.

    Raises:
        TrainingError: it is no text, empty, or has control characters, which a terminal would obey.
    """
    if not isinstance(name, str) or not name:
        raise TrainingError(f"self.log: a metric's name is a non-empty string, not {name!r}")
    if "\n" in name or printable(name) != name:
        raise TrainingError(
            f"self.log: the metric's name {name!r} has a control character. Fix: take it out"
        )


def scalar(name: str, value: Any) -> Any:
    """Return a logged value, checked: a float, or a tensor of one element on its device.

    Raises:
        TrainingError: neither.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TrainingError(
                f"self.log({name!r}): a metric is one number, and this tensor has the shape {list(value.shape)}. Fix: .mean()?"
            )
        if value.is_cpu:
            return scalar(name, value.item())
        # A copy: the tensor may be changed in place before it is read, as a running total is.
        return value.detach().clone()
    if isinstance(value, Number) and not isinstance(value, complex):
        return float(value)  # type: ignore[arg-type]
    raise TrainingError(
        f"self.log({name!r}): a metric is a number or a tensor of one element, not {type(value).__name__}"
    )


def check_batch_size(name: str, size: Any) -> int:
    """Return a given ``batch_size`` as an int; torch or NumPy may have counted it.

    Raises:
        TrainingError: it is none, or negative.
    """
    try:
        number = operator.index(size)
    except TypeError:
        number = -1
    if number < 0:
        raise TrainingError(
            f"self.log({name!r}): batch_size={size!r} is no whole number of samples, 0 or more. Fix: batch_size=int(...), or leave it out"
        )
    return number


def _read(tensors: list[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        tensors = [t.cpu().double() for t in tensors]
    stacked: list[float] = torch.stack([t.reshape(()) for t in tensors]).cpu().double().tolist()
    return stacked


def _difference(a: MetricOptions, b: MetricOptions) -> str:
    return ", ".join(
        f"{n}={getattr(a, n)!r} then, {getattr(b, n)!r} now"
        for n in MetricOptions.__slots__
        if getattr(a, n) != getattr(b, n)
    )
