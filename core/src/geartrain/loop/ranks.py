"""The common work of a run's ranks, besides the collectives of its hooks; here for one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.data.stage import Stage
    from geartrain.loop.run import Run
    from geartrain.metrics.local import LocalMetric, MetricOptions


class EpochIsOver(Exception):
    """``on_train_batch_start`` returned -1; ``train_epoch`` catches it."""


class RankCoordinator:
    """The only rank. With several, ``geartrain.parallel.SeveralRanks`` replaces it.

    Every rank must call each method in the same place.
    """

    def check(self, run: Run, checkpoint: str | None = None) -> None:
        """Refuse ranks that were set up differently, once the module is set up.

        Args:
            checkpoint: the name of the file that this rank will read.

        Raises:
            TrainingError: ranks differ; it names the difference and the ranks.
        """

    def check_loaders(self, run: Run, stage: str, count: int) -> None:
        """Refuse ranks with different numbers of loaders; their collectives would not match."""

    def count_batches(self, run: Run, name: str, stage: Stage) -> Stage:
        """Return a stage with the numbers of batches of all ranks, from this rank's stage.

        Args:
            name: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        return stage

    def batches(self, run: Run, batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """Return this rank's batches, at most ``limit`` of its own.

        Every rank calls its step equally often, so that collectives inside it cannot deadlock. A
        rank that has no more batches in an evaluation repeats one: then ``run.repeating`` is true,
        and logged values are dropped.
        """
        return islice(batches, limit)

    def total_weight(self, run: Run, weight: Any) -> Any:
        """Return the sum of all ranks' weights of the losses of one optimizer step.

        Args:
            weight: the sum on this rank, a float or a 0-d tensor; ``None`` if losses have none.

        Raises:
            TrainingError: only some ranks' losses have weights, or a sum is negative or not finite.
        """
        return weight

    def mean_loss(self, run: Run, loss: Any) -> Any:
        """Return the mean of a closure's loss: with different ones, line searches would hang."""
        return loss

    def end_epoch(self, run: Run) -> None:
        """End an epoch, as ``on_train_batch_start`` -> -1 asks; with several ranks an error."""
        raise EpochIsOver

    def broadcast_buffers(self, run: Run) -> None:
        """Copy rank 0's buffers to all ranks: each rank's BatchNorm has other statistics."""

    def check_agreement(self, run: Run, begins: bool = False) -> None:
        """Refuse a rank that alone changed options or weights; before training copy the latter."""

    def outputs(self, run: Run, local: list[Any], loader: Any) -> list[Any]:
        """Return the outputs of ``predict_step`` of all ranks for a loader, from this rank's."""
        return local

    def gather_states(self, run: Run, local: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all ranks' states, in order, on rank 0; on other ranks only their own."""
        return [local]

    def gather(self, run: Run, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors and numbers as :meth:`geartrain.Module.all_gather` does."""
        from geartrain.module.nested import map_tensors  # imports torch

        return map_tensors(data, lambda t: run.hooks.all_gather(run=run, tensor=t), run.device)

    def reduce(
        self, run: Run, metrics: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        """Reduce metrics that were logged with ``sync_dist``, and agree on objects' names.

        Returns:
            Each number's value; each metric's options, which a rank without samples does not know;
            and True if any rank wants to stop.
        """
        numbers = {name: metric for name, metric in metrics.items() if metric.spec.path is None}
        return {name: metric.value(name) for name, metric in numbers.items()}, {}, run.should_stop
