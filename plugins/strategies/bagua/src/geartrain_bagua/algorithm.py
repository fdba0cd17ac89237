"""The base class of algorithms: an algorithm is one way to keep ranks together.

The strategy calls these methods; an algorithm overrides those that it needs.
A step, in order, with ``m`` micro-batches::

    start_step()               # before the first forward
      forward, backward        # m times; between two of them ``computing()`` is left and re-entered
        reduce(bucket)         # in the communication thread, during the last backward
    end_backward()             # all reductions are done; raises their errors
      unscale, clip            # after end_backward
      optimizers step          # end_step follows also if a scaler skips an optimizer's step
    end_step()
      on_step_end of plugins   # inside ``computing()`` too
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch.distributed as dist

    from geartrain import Module, Plan, Run
    from geartrain_bagua.buckets import Bucket
    from geartrain_bagua.channel import Channel


@dataclass(frozen=True, slots=True)
class Peers:
    """A process group, with this process's rank in it."""

    group: dist.ProcessGroup
    #: This process's rank in the group, from 0.
    rank: int
    size: int
    #: Global ranks of the group's members, in the order of their ranks in the group.
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """The run, buckets, thread and process groups of an algorithm, from ``set_up`` to ``close``."""

    run: Run
    #: The parameters that need gradients, in the reverse of the module's order, as in backward.
    buckets: Sequence[Bucket]
    #: The communication thread. Only this thread uses the three groups below.
    channel: Channel
    #: All ranks.
    everyone: Peers
    #: The ranks of this node; ``None`` if the algorithm is not hierarchical.
    node: Peers | None = None
    #: The first rank of each node; ``None`` on other ranks, and if ``node`` is ``None``.
    leaders: Peers | None = None

    @property
    def rank(self) -> str:
        """The beginning of an error of this rank."""
        return f"{self.run.plan.strategy.label}: rank {self.run.world.rank}"


class Algorithm:
    """Base class of algorithms. It does nothing: each rank trains alone.

    The typed arguments of ``__init__`` are the algorithm's options.

    Each run uses a shallow copy of the chosen object. Create state that a run changes in
    ``set_up``, or take it from ``load_state_dict``. A method that is not overridden costs no time.
    """

    #: ``"gradients"``: after each last backward ``reduce`` is called with them in ``bucket.flat``.
    #: ``None``: ``reduce`` is not called. It may change between steps, on all ranks at once.
    reduces: str | None = None
    #: True if buckets are padded with zeros to a multiple of the world size.
    pads: ClassVar[bool] = False
    #: True if the strategy's ``average_gradients`` may replace this algorithm. If False, manual
    #: optimisation and a Session are refused.
    averages_gradients: bool = False
    #: True if the algorithm uses groups inside and between nodes. It may be an option.
    hierarchical: bool = False
    #: Capabilities for the conformance kit that differ from the strategy's.
    capabilities: ClassVar[dict[str, Any]] = {}

    context: Context

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        """Raise ``UsageError`` for a plan that cannot work, before processes start.

        Raises:
            UsageError: the algorithm does not support the plan or the module.
        """

    def set_up(self, context: Context) -> None:
        """Start a run. Every rank has rank 0's weights; resumed optimizers have their state."""
        self.context = context

    def start_step(self) -> None:
        """Start a step: called before its first forward."""

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context manager around code that reads or writes weights.

        A step enters it once per micro-batch. The first part includes the start of the step, the
        last part the optimizers and the module's hooks. The hook ``on_step_end`` runs inside it
        too. ``pause`` may be called inside it.
        """
        return nullcontext()

    def reduce(self, bucket: Bucket) -> None:
        """Replace ``bucket.flat``, this rank's gradients, by the gradients for the optimizers.

        Called in the communication thread, one bucket at a time, in the same order on every rank.
        """

    def end_backward(self) -> None:
        """Finish backward: called when every ``reduce`` is done and gradients are written back."""

    def end_step(self) -> None:
        """Finish a step: called after all optimizers."""

    def pause(self) -> None:
        """Keep the weights unchanged until ``resume`` or ``close``.

        Called before an evaluation or a checkpoint.
        """

    def resume(self) -> None:
        """Resume training after ``pause``: called before ``start_step``."""

    def close(self, failed: bool) -> None:
        """Release everything that ``set_up`` created. The strategy removes the context afterwards.

        Args:
            failed: the run failed; other ranks may be dead, so do not wait for them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint: tensors and plain values.

        It may be called before ``set_up`` and after ``close``.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of ``state_dict``: called before ``set_up`` if a run resumes."""
