"""What an algorithm is: one way to keep ranks together. The strategy calls these methods; an algorithm overrides what it needs.

A step, in order, with ``m`` micro-batches::

    start_step()                      # before the first forward
      forward, backward               # m times; where one ends and the next begins, one ``computing()`` ends and another begins
        reduce(bucket)                # in the communication thread, while the last backward goes on
    end_backward()                    # every reduce is done, its error is raised here; then unscaling and clipping
      optimizers step                 # also where a scaler skips one
    end_step()
      on_step_end of plugins          # inside a ``computing()`` too
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
    """A process group as an algorithm uses it."""

    group: dist.ProcessGroup
    #: This process in the group, from 0.
    rank: int
    size: int
    #: Global ranks of the group's members, by their rank in it.
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What an algorithm works with, from ``set_up`` on."""

    run: Run
    #: Parameters that need gradients, in reverse order of the module's, as backward makes them.
    buckets: Sequence[Bucket]
    #: The communication thread; whatever runs there uses groups that nobody else uses.
    channel: Channel
    #: All ranks, in a group of the communication thread's own.
    everyone: Peers
    #: The ranks of this node; ``None`` where the algorithm is not hierarchical.
    node: Peers | None = None
    #: Each node's first rank; ``None`` on the other ranks and where the algorithm is not hierarchical.
    leaders: Peers | None = None


class Algorithm:
    """Does nothing: ranks train alone. ``__init__``'s typed arguments are the algorithm's options.

    Each run works with a shallow copy of the object that was chosen: what a run changes is made in ``set_up``, or taken up in
    ``load_state_dict``. A method that is not overridden costs a step nothing.
    """

    #: What ``reduce`` is given in ``bucket.flat`` after each last backward: ``"gradients"``; ``None``: ``reduce`` is not called. It may
    #: change between steps, on all ranks in the same one.
    reduces: str | None = None
    #: Buckets are padded with zeros to a multiple of the world's size.
    pads: ClassVar[bool] = False
    #: False if the strategy's ``average_gradients`` would break it: then manual optimisation and a Session are refused.
    averages_gradients: bool = False
    #: Whether groups inside and between nodes are wanted; an option where it is one.
    hierarchical: bool = False
    #: What the conformance kit may expect, beside what every algorithm shares.
    capabilities: ClassVar[dict[str, Any]] = {}

    context: Context

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        """Refuse what cannot work, by raising ``UsageError``, before anything starts."""

    def set_up(self, context: Context) -> None:
        """Begin: every rank has rank 0's weights, optimizers are made and, where a run is resumed, loaded."""
        self.context = context

    def start_step(self) -> None:
        """Before a step's first forward."""

    def computing(self) -> AbstractContextManager[Any]:
        """Around what reads and writes weights: a step from its beginning to the second micro-batch, from each micro-batch to the next,
        and from the last to the end, with optimizers and the module's hooks; and around the hook ``on_step_end``. A ``pause`` may come
        inside of it."""
        return nullcontext()

    def reduce(self, bucket: Bucket) -> None:
        """Replace ``bucket.flat``, this rank's gradients, by what the optimizers shall see. In the communication thread, one bucket at a
        time, in the same order on every rank."""

    def end_backward(self) -> None:
        """Every ``reduce`` is done and gradients are written back."""

    def end_step(self) -> None:
        """After all optimizers."""

    def pause(self) -> None:
        """An evaluation or a checkpoint comes: weights must stay as they are until ``resume`` or ``close``."""

    def resume(self) -> None:
        """Training goes on, after a ``pause``: before ``start_step``."""

    def close(self, failed: bool) -> None:
        """The end of what ``set_up`` began, also after an error; must not wait for ranks that may be gone where ``failed``. The context
        is taken away after it."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: tensors and plain values; also before ``set_up`` and after ``close``."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before ``set_up`` where a run is resumed."""
