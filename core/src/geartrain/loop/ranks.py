"""The common work of a run's ranks, beside the collectives of its hooks: here, of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.loop.run import Run, Stage
    from geartrain.metrics.local import LocalMetric, MetricOptions


class OneRank:
    """A rank that is alone. ``geartrain.parallel.SeveralRanks`` does the same among others, which all call each method together."""

    def check(self, run: Run, checkpoint: str | None = None) -> None:
        """Refuse ranks that were set up differently, once the module is set up.

        Args:
            checkpoint: the name of the file that this rank will read.

        Raises:
            TrainingError: what differs, and on which rank.
        """

    def count_batches(self, run: Run, name: str, stage: Stage) -> Stage:
        """Return a stage with the batches of all ranks, from a stage with this rank's.

        Args:
            name: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        return stage

    def batches(self, run: Run, batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """Return the batches for which this rank calls its step, at most ``limit`` of its own.

        Every rank calls its step equally often, so that collectives inside it cannot deadlock: if a rank has run out in an evaluation, it
        repeats a batch. Then ``run.repeating`` is true, and logged values leave no trace.
        """
        return islice(batches, limit)

    def broadcast_buffers(self, run: Run) -> None:
        """Give every rank rank 0's buffers: each rank's BatchNorm has seen its own batches, and would evaluate by its own statistics."""

    def outputs(self, run: Run, mine: list[Any], loader: Any) -> list[Any]:
        """Return the outputs of ``predict_step`` for a loader on all ranks, from those of this rank."""
        return mine

    def gather_states(self, run: Run, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each rank's state, in order, on rank 0, which writes the checkpoint. The others get their own."""
        return [mine]

    def reduce(
        self, run: Run, metrics: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        """Reduce metrics that were logged with ``sync_dist``.

        Returns:
            Each metric's value; how each was logged, which a rank without samples learns here; and whether any rank wants to stop.
        """
        return {name: metric.value(name) for name, metric in metrics.items()}, {}, run.should_stop
