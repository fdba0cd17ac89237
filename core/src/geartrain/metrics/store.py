"""The values of ``self.log``, and their flushes.

A logged tensor stays on its device until the flush, which reads all of them at once. Only there the
CPU waits for the GPU. A tensor on the CPU is read immediately, which costs less than a copy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from geartrain.data.loaders import BatchSizer
from geartrain.errors import TrainingError, warn
from geartrain.metrics import reductions
from geartrain.metrics.local import LocalMetric, MetricOptions
from geartrain.metrics.objects import library_of, path_of, refuse_unknown

if TYPE_CHECKING:
    from geartrain.loop.run import Run


#: Names that a line of metrics.jsonl, or of a logger, has besides the metrics.
_OF_EACH_LINE = ("step", "epoch", "stage")


@dataclass(slots=True)
class _Metric(LocalMetric):
    name: str = field(kw_only=True)
    #: The options of the last call; equal ones are not checked again.
    asked: tuple[Any, ...] = ()
    #: (value, weight) since the last ``drain``, with tensors on their device; only the newest pair
    #: if ``on_epoch`` is false.
    pending: list[tuple[Any, int]] = field(default_factory=list)
    #: Optimizer steps at the last call, with the step in which it was logged.
    step: int = 0
    #: The newest value and its weight; the weight is 0 after a report.
    last: tuple[float, int] = (0.0, 0)
    #: True if ``run.metrics`` lacks it.
    unread: bool = False
    #: The logged object of another library, which keeps the epoch's value itself.
    source: Any = None

    def add(self, value: float, weight: int) -> None:
        self.last, self.unread = (value, weight), True
        if not self.spec.on_epoch or self.source is not None:
            return
        reduce_fx = self.spec.reduce_fx
        if self.function is not None:
            self.samples.append(value)
        else:
            total = self.total if self.weight else reductions.START[reduce_fx]
            share = value * weight if reduce_fx == "mean" else value
            self.total = reductions.combine(reduce_fx, total, share)
        self.weight += weight

    def newest(self) -> LocalMetric:
        """Return the newest value alone."""
        value, weight = self.last
        total = value * weight if self.spec.reduce_fx == "mean" else value
        return LocalMetric(self.spec, total, weight, self.function, [value])

    def forget(self) -> None:
        """Begin the next epoch."""
        if self.source is not None:
            self.source.reset()
        self.total, self.weight, self.samples, self.source = 0.0, 0, [], None


class MetricStore:
    """The values that were logged in the running stage and not reported yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics: dict[str, _Metric] = {}
        self._sized: tuple[Any, int] = (None, 1)
        #: (stage, loader's index) -> its BatchSizer.
        self._sizers: dict[tuple[str, int], BatchSizer] = {}
        #: Newest values of the metrics marked ``prog_bar``.
        self.prog_bar: dict[str, float] = {}
        #: Newest values of the metrics handed to loggers.
        self.logged: dict[str, float] = {}
        #: The epoch and the steps done when the newest value of each metric was logged.
        self.when: dict[str, tuple[int, int]] = {}
        self._has_nan = False
        #: True if any rank wanted to stop at the last flush.
        self.stop = False
        #: True if values logged now will be reported; after the end of an epoch they would be lost.
        self.open = True
        #: The metrics of the stages around the running evaluation, outermost first.
        self._around: list[dict[str, _Metric]] = []

    @staticmethod
    def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return values to log as numbers, of which tensors on a GPU are read now.

        Raises:
            TrainingError: a name that no metric can have, or a value that is not one number.
        """
        for name in metrics:
            check_name(name)
        return {name: float(scalar(name, value)) for name, value in metrics.items()}

    # --- the hot path -----------------------------------------------------------------------------

    def items_of(self, dictionary: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        """Return the names and values that ``log_dict`` logs."""
        library = library_of(dictionary)
        return dictionary.items() if library is None else library.items(dictionary)

    def log(
        self,
        name: str,
        value: Any,
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
        # Inlined: in a real step a function call costs three times as much as in a tight loop.
        asked = (in_step, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        metric = self._metrics.get(name)
        if metric is None or metric.asked != asked or not self.open:
            metric = self._check(name, asked)
        if rank_zero_only and run.world.rank != 0:
            return
        metric.step = run.step + in_step
        if value.__class__ is torch.Tensor and value.is_cpu and value.dtype is torch.float32:
            # The checks of `scalar` cost 4 µs.
            value = value.item() if value.numel() == 1 else scalar(name, value)
        elif value.__class__ is not float:
            if isinstance(value, nn.Module):
                self._keep(metric, value)
                return
            value = scalar(name, value)
        if batch_size is None:
            batch_size = 1  # weights matter for several values, or ranks
            if metric.spec.on_epoch or metric.spec.sync_dist:
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
        if run.batch is None or run.stage == "train" or len(run.current_stage.loaders) < 2:
            return name
        return f"{name}/dataloader_idx_{run.dataloader_idx}"

    def _check(self, name: str, asked: tuple[Any, ...]) -> _Metric:
        """Check the options; return the metric of this name, or make it."""
        in_step, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only = asked
        if not self.open:
            raise TrainingError(
                f"self.log({name!r}) comes after the metrics of the epoch are reported and would "
                "be lost. Fix: log it in on_train_epoch_end or on_validation_epoch_end"
            )
        on_step = in_step if on_step is None else on_step
        on_epoch = not in_step if on_epoch is None else on_epoch
        key = reductions.key(reduce_fx)
        spec = MetricOptions(prog_bar, logger, on_step, on_epoch, key, sync_dist, rank_zero_only)
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._new(name, spec, reduce_fx)
        elif metric.spec != spec:
            both = [(n, getattr(metric.spec, n), getattr(spec, n)) for n in MetricOptions.__slots__]
            difference = ", ".join(f"{n}={x!r} then, {y!r} now" for n, x, y in both if x != y)
            raise TrainingError(
                f"self.log({name!r}) was called with other options before: {difference}. "
                "Fix: use another name"
            )
        elif metric.function is None:
            metric.function = reductions.check(name, reduce_fx)  # a checkpoint cannot hold it
        metric.asked = asked
        return metric

    def _new(self, name: str, spec: MetricOptions, reduce_fx: Any) -> _Metric:
        check_name(name)
        if not spec.on_step and not spec.on_epoch:
            raise TrainingError(
                f"self.log({name!r}) would never be reported: on_step and on_epoch are False, "
                "given or by default here. "
                "Fix: on_step=True for each step, or on_epoch=True for the epoch"
            )
        if spec.rank_zero_only and spec.sync_dist:
            message = "rank_zero_only and sync_dist contradict each other"
            raise TrainingError(f"self.log({name!r}): {message}. Fix: take one out")
        return _Metric(spec, function=reductions.check(name, reduce_fx), name=name)

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
                f"self.log({metric.name!r}) was given another {type(value).__name__} before. "
                "Fix: give each a name"
            )
        if newest is not None:
            metric.pending.append((scalar(metric.name, newest), 1))
        metric.source = value

    def _size(self, batch: Any) -> int:
        """Return a batch's weight in a mean, and keep it for other metrics of the batch."""
        run = self._run
        key = run.stage, run.dataloader_idx
        sizer = self._sizers.get(key)
        if sizer is None:
            # In a Session a logged value belongs to no batch.
            in_session = run.mode == "session"
            loader = None if in_session else run.current_stage.loaders[run.dataloader_idx]
            sizer = self._sizers[key] = BatchSizer(loader, run.world.rank == 0)
        size = 1 if batch is None else sizer.size(batch) or 1
        self._sized = (batch, size)
        return size

    def forget_loaders(self) -> None:
        """Look again how many samples batches have: the loaders are other ones."""
        self._sizers.clear()

    # --- flushes ----------------------------------------------------------------------------------

    def drain(self, metrics: dict[str, _Metric] | None = None) -> None:
        """Read every pending value in one transfer and add it to its metric. The CPU waits here."""
        metrics = self._metrics if metrics is None else metrics
        pending = [(metric, *value) for metric in metrics.values() for value in metric.pending]
        tensors = [value for _, value, _ in pending if isinstance(value, torch.Tensor)]
        read = iter(_read(tensors) if tensors else ())
        for metric, value, weight in pending:
            metric.add(next(read) if isinstance(value, torch.Tensor) else value, weight)
        for metric in metrics.values():
            metric.pending.clear()
        self._sized = (None, 1)  # releases the batch

    def flush(self) -> None:
        """Report the newest values logged ``on_step``; ranks agree whether to stop."""
        self.drain()
        newest = [m for m in self._metrics.values() if m.spec.on_step and m.last[1]]
        shares = {metric.name: metric.newest() for metric in newest}
        for metric in newest:
            metric.last = (0.0, 0)
        self._report(self._reduce(shares), "_step")

    def end_epoch(self) -> dict[str, float]:
        """Report and forget the metrics logged ``on_epoch``.

        Returns:
            The values by their reported names.
        """
        values = self._epoch_values()
        self._warn_of_one_rank()
        reported = self._report(values, "_epoch")
        for metric in self._metrics.values():
            metric.forget()
        self.open = False
        return reported

    def refresh_epoch(self) -> None:
        """Update ``run.metrics`` with the metrics logged ``on_epoch``, for hooks that read them."""
        for name, value in self._epoch_values().items():
            metric = self._metrics.get(name)
            spec = None if metric is None else metric.spec
            self._put(name, spec, "_epoch", value, self._run.step)

    def _epoch_values(self) -> dict[str, float]:
        """Return the metrics logged ``on_epoch``; ranks agree on the objects that all compute."""
        self.flush()
        shares: dict[str, LocalMetric] = {}
        for name, m in self._metrics.items():
            # The user's function of a metric from a checkpoint is not known until the next log.
            if m.source is not None or (
                m.spec.on_epoch
                and m.weight
                and (m.function or m.spec.reduce_fx in reductions.NAMED)
            ):
                spec = self._spec_with_path(m)
                shares[name] = LocalMetric(spec, m.total, m.weight, m.function, m.samples)
        values = self._reduce(shares)
        for name, m in sorted(self._metrics.items()):
            library = None if m.source is None else library_of(m.source)
            if library is not None and m.spec.on_epoch:
                values[name] = library.compute(self._run, name, m.source)
            m.step = self._run.step  # of the whole epoch
        return values

    def _warn_of_one_rank(self) -> None:
        """Warn that an evaluation's metrics cover only a part of the data."""
        run, specs = self._run, {m.name: m.spec for m in self._metrics.values() if m.weight}
        names = [n for n, spec in specs.items() if not spec.sync_dist and not spec.rank_zero_only]
        evaluates = run.stage in ("validate", "test")
        if names and evaluates and run.world.data_size > 1 and run.world.rank == 0:
            message = f"{run.stage}: {', '.join(names)} is of rank 0's part of the data alone"
            hint = "self.log(..., sync_dist=True) for all of it, or pass rank_zero_only=True"
            warn(f"{message}. Fix: {hint} if only rank 0 computes it")

    def _reduce(self, shares: Mapping[str, LocalMetric]) -> dict[str, float]:
        """Return each metric's value, over all ranks with ``sync_dist``; agree whether to stop."""
        values, specs, self.stop = self._values(shares)
        for name, spec in specs.items():
            self._adopt(name, spec)
        return values

    def _values(
        self, shares: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        """Return values, the options of those with ``sync_dist``, and True if a rank must stop."""
        numbers = {name: share for name, share in shares.items() if share.spec.path is None}
        alone = {name for name, share in numbers.items() if not share.spec.sync_dist}
        together = {name: share for name, share in shares.items() if name not in alone}
        synced, specs, stop = self._run.coordinator.reduce(self._run, together)
        values = {n: s.value(n) if n in alone else synced[n] for n, s in numbers.items()}
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
        if run.world.rank == 0 and not self._has_nan:
            self._warn_of_nan(logged)
        if logged and run.world.rank == 0 and run.stage != "sanity_check":
            run.hooks.log_metrics(run=run, metrics=logged, step=run.step)
        return shown

    def _warn_of_nan(self, values: Mapping[str, float]) -> None:
        names = [name for name, value in values.items() if math.isnan(value)]
        self._has_nan = bool(names)
        if names:
            place = f"{', '.join(names)} became NaN by step {self._run.step}"
            warn(f"{place}. Fix: --plugin nan_guard finds the step")

    # --- between flushes --------------------------------------------------------------------------

    def read(self) -> None:
        """Update ``run.metrics`` with this rank's values. The CPU waits for the GPU only."""
        for name, metric in self._not_reported().items():
            if metric.unread:
                self._put(name, metric.spec, "_step", metric.newest().value(name), metric.step)
                metric.unread = False

    def refresh(self, *names: str) -> None:
        """Update these metrics in ``run.metrics``, those with ``sync_dist`` over all ranks.

        Every rank must call this in the same place.

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
        """Return a metric's newest value and its (epoch, step); without one, the known names.

        The value is reduced if it is logged with ``sync_dist``, otherwise rank 0's. Every rank must
        call this in the same place, and gets the same.
        """
        run = self._run
        self.refresh(name)
        value = run.loop.reported.get(name)
        found = value, self.when.get(name), sorted(run.metrics) if value is None else []
        return found if run.world.size == 1 else run.hooks.broadcast(run=run, obj=found, src=0)

    def _not_reported(self, names: Collection[str] = ()) -> dict[str, _Metric]:
        """Read the values logged ``on_step`` and not reported yet, of all metrics or of ``names``.

        If the running evaluation and the training around it log one name, the evaluation's counts.
        """
        known: dict[str, _Metric] = {}
        for metrics in (*self._around, self._metrics):
            known |= metrics
        found: dict[str, _Metric] = {}
        for name, metric in known.items():
            key = _with_suffix(name, "_step") if metric.spec.on_epoch else name
            is_new = metric.spec.on_step and (metric.pending or metric.last[1])
            if is_new and (not names or name in names or key in names):
                found[name] = metric
        if found:
            self.drain(found)
        return found

    def _put(
        self, name: str, spec: MetricOptions | None, suffix: str, value: float, step: int
    ) -> str:
        """Keep a newest value; return the name under which it is reported."""
        run, key = self._run, name
        if spec is not None and spec.on_step and spec.on_epoch:
            key = _with_suffix(name, suffix)
        run.loop.reported[name] = run.loop.reported[key] = value
        self.when[name] = self.when[key] = (run.epoch, step)
        return key

    def _spec_with_path(self, metric: _Metric) -> MetricOptions:
        path = None if metric.source is None else path_of(self._run.module, metric.source)
        return replace(metric.spec, path=path)

    def _adopt(self, name: str, spec: MetricOptions) -> _Metric:
        """Keep a metric that another rank or a checkpoint has, with its object."""
        run, plain = self._run, replace(spec, path=None)
        metric = self._metrics.setdefault(name, _Metric(plain, name=name, step=run.step))
        if metric.source is None and spec.path:
            metric.source = run.module.get_submodule(spec.path)
        return metric

    # --- scopes -----------------------------------------------------------------------------------

    @contextmanager
    def scope(self, keep: bool = True) -> Iterator[None]:
        """Separate an evaluation's metrics from the epoch around it; drop them if not ``keep``."""
        run, outer, was_open = self._run, self._metrics, self.open
        before = dict(run.loop.reported), dict(self.prog_bar), dict(self.logged), dict(self.when)
        self._metrics, self.open = {}, True
        self._around.append(outer)
        try:
            yield
        finally:
            self._around.pop()
            self._metrics, self.open = outer, was_open
            if not keep:
                run.loop.reported, self.prog_bar, self.logged, self.when = before

    # --- its state --------------------------------------------------------------------------------

    def state_dict(self, within_epoch: bool) -> dict[str, Any]:
        """Return the reported values and, within an epoch, the values logged so far.

        All are plain values, so the CPU waits for the GPU here. Objects of other libraries have
        their own state; only their paths in the module are here.
        """
        metrics = self._around[0] if self._around else self._metrics
        if within_epoch:
            self.drain(metrics)
        epoch = {
            m.name: [
                list(astuple(self._spec_with_path(m))),
                *(list(m.last), m.total, m.weight, list(m.samples)),
            ]
            for m in metrics.values()
        }
        return {
            "metrics": dict(self._run.loop.reported),
            "logged": dict(self.logged),
            "prog_bar": dict(self.prog_bar),
            "when": dict(self.when),
            "epoch": epoch if within_epoch else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the reported values."""
        self._run.loop.reported.update(state["metrics"])
        self.logged.update(state["logged"])
        self.prog_bar.update(state["prog_bar"])
        self.when.update(state["when"])

    def resume_epoch(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch's values, if the state was saved within it; drop newer ones."""
        if state["epoch"] is None:
            return
        self._metrics = {}
        for name, (spec, last, total, weight, values) in state["epoch"].items():
            metric = self._adopt(name, MetricOptions(*spec))
            metric.last, metric.samples, metric.unread = (last[0], last[1]), list(values), True
            metric.total, metric.weight = total, weight


def _with_suffix(name: str, suffix: str) -> str:
    metric, index, loader = name.partition("/dataloader_idx_")
    return metric + suffix + index + loader


def check_name(name: Any) -> None:
    """Refuse a name that no metric can have.

    Raises:
        TrainingError: it is no string, empty, has control characters, which a terminal obeys, or is
            reserved.
    """
    if not isinstance(name, str) or not name:
        raise TrainingError(f"self.log: a metric's name is a non-empty string, not {name!r}")
    if not name.isprintable():
        message = f"the metric's name {name!r} has a control character"
        raise TrainingError(f"self.log: {message}. Fix: take it out")
    if name in _OF_EACH_LINE:
        message = f"metrics.jsonl and loggers write the run's own {name} under this name"
        raise TrainingError(f"self.log({name!r}): {message}. Fix: use another name, as 'my_{name}'")


def scalar(name: str, value: Any) -> Any:
    """Check a logged value; return a float, or a tensor of one element on its device.

    Raises:
        TrainingError: it is neither a number nor a tensor of one element.
    """
    if isinstance(value, torch.Tensor):
        if placements := getattr(value, "placements", None):  # item() is a rank's part
            if not all(placement.is_replicate() for placement in placements):
                reason = f"self.log({name!r}): ranks have parts of this tensor"
                raise TrainingError(f"{reason}. Fix: .full_tensor(), on all ranks")
            value = value.to_local()  # type: ignore[attr-defined]
        if value.numel() != 1:
            message = f"a metric is one number, and this tensor has the shape {list(value.shape)}"
            raise TrainingError(f"self.log({name!r}): {message}. Fix: .mean()?")
        if value.is_cpu:
            return scalar(name, value.item())
        # A copy: the module may change the tensor in place before it is read (a running total).
        return value.detach().clone()
    if isinstance(value, Number) and not isinstance(value, complex):
        return float(value)  # type: ignore[arg-type]
    message = f"a metric is a number or a tensor of one element, not {type(value).__name__}"
    raise TrainingError(f"self.log({name!r}): {message}")


def check_batch_size(name: str, size: Any) -> int:
    """Return a given ``batch_size`` as an int; it may be an integer of torch or NumPy.

    Raises:
        TrainingError: it is no integer, or negative.
    """
    try:
        number = operator.index(size)
    except TypeError:
        number = -1
    if number < 0:
        raise TrainingError(
            f"self.log({name!r}): batch_size={size!r} is no whole number of samples, 0 or more. "
            "Fix: batch_size=int(...), or leave it out"
        )
    return number


def _read(tensors: list[torch.Tensor]) -> list[float]:
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        tensors = [t.cpu().double() for t in tensors]
    stacked: list[float] = torch.stack([t.reshape(()) for t in tensors]).cpu().double().tolist()
    return stacked
