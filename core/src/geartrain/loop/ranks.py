"""The common work of a run's ranks, besides the collectives of its hooks; here for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from geartrain.module.nested import map_tensors, with_tensors

if TYPE_CHECKING:
    import torch

    from geartrain.loop.run import Run, Stage
    from geartrain.metrics.local import LocalMetric, MetricOptions


class OneRank:
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

    def broadcast_buffers(self, run: Run) -> None:
        """Copy rank 0's buffers to all ranks: each rank's BatchNorm has other statistics."""

    def outputs(self, run: Run, mine: list[Any], loader: Any) -> list[Any]:
        """Return the outputs of ``predict_step`` of all ranks for a loader, from this rank's."""
        return mine

    def gather_states(self, run: Run, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all ranks' states, in order, on rank 0; on other ranks only their own."""
        return [mine]

    def gather(
        self,
        run: Run,
        data: Any,
        sync_grads: bool = False,
        function: Callable[[Any], Any] = lambda gathered: gathered,
    ) -> Any:
        """Gather nested data as :meth:`geartrain.Module.all_gather` does.

        Args:
            function: is called with each tensor that is gathered, or the list of the ranks'.
        """
        tensors: list[torch.Tensor] = []
        data = with_tensors(data, run.device)
        map_tensors(data, tensors.append)
        gathered = iter(self.gather_tensors(run, tensors, sync_grads))
        return map_tensors(data, lambda _: function(next(gathered)))

    def gather_tensors(
        self, run: Run, tensors: list[torch.Tensor], sync_grads: bool
    ) -> Iterable[torch.Tensor | list[torch.Tensor]]:
        """Return each tensor of all ranks, with gradients if ``sync_grads``."""
        return [run.hooks.all_gather(run=run, tensor=tensor) for tensor in tensors]

    def reduce(
        self, run: Run, metrics: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        """Reduce metrics that were logged with ``sync_dist``, and agree on objects' names.

        Returns:
            Each number's value; each metric's options, which a rank without samples does not know;
            and True if any rank wants to stop.
        """
        numbers = {name: one for name, one in metrics.items() if one.spec.path is None}
        return {name: one.value(name) for name, one in numbers.items()}, {}, run.should_stop
