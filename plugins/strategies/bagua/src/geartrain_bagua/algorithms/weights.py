"""Shared code of the algorithms that exchange weights, so that each rank has different weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from geartrain import Run, TrainingError, UsageError
from geartrain.plugin_api import load_optimizer, not_plain
from geartrain_bagua.algorithm import Algorithm, Context, Peers
from geartrain_bagua.buckets import Bucket

#: The end of an error message about a checkpoint.
SAME_AS_THEN = (
    "Fix: use the same {} as in the run that saved it, or load only its weights with checkpoint="
)


class OwnWeights(Algorithm):
    """Base of algorithms whose weights differ between ranks.

    Ranks communicate every ``communication_interval`` steps, from the first step on.

    The model in a checkpoint is rank 0's. ``state_dict`` has this rank's weights and the states of
    its optimizers and schedulers; a run that resumes on the same number of ranks continues with
    them. Each rank validates its own model, so metrics are means over different models. With
    precision 16-mixed, each rank's scaler skips steps independently, and schedulers skip with it.
    Communication does not depend on skipped steps, so the ranks' collectives still match.
    """

    capabilities: ClassVar[dict[str, Any]] = {
        "identical_weights": False,
        "weighted_loss": False,
        "unused_parameters": True,
        "convergence": 0.1,
    }
    #: Finished training steps.
    steps = 0
    _ranks = 0
    _run: Run
    _buckets: Sequence[Bucket] | None = None
    _loaded: dict[str, Any] | None = None

    def __init__(self, hierarchical: bool, communication_interval: int) -> None:
        if communication_interval < 1:
            raise UsageError(
                f"communication_interval={communication_interval!r} must be 1 or more steps."
            )
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    @property
    def due(self) -> bool:
        """True if this step communicates."""
        return self.steps % self.communication_interval == 0 and self._ranks > 1

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        refuse_closure(context)
        self._buckets, self._ranks = context.buckets, context.everyone.size
        self._run, self._frozen = context.run, frozen(context)
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self.steps = state["steps"]
        if state["ranks"] == self._ranks:  # with another number, start from rank 0's weights
            self.restore(state)

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state of a run with the same number of ranks.

        Raises:
            UsageError: the state has other buckets.
        """
        then = [len(weights) for weights in state["weights"]]
        current = [len(bucket.flat) for bucket in self.context.buckets]
        if then != current:
            raise UsageError(
                f"the checkpoint has each rank's weights in {len(then)} buckets of {sum(then)} "
                f"elements, but this run has {len(current)} buckets of {sum(current)} elements. "
                f"{SAME_AS_THEN.format('bucket_bytes and frozen parameters')}"
            )
        for bucket, weights in zip(self.context.buckets, state["weights"], strict=True):
            bucket.give_weights(weights)
        give_states(self._run, state)

    def start_step(self) -> None:
        refuse_unfrozen(self.context, self._frozen)

    def end_step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        if self._buckets is None:
            return self._loaded or {"steps": 0, "ranks": 0}
        weights = [bucket.take_weights(torch.empty_like(bucket.flat)) for bucket in self._buckets]
        return {"steps": self.steps, "ranks": self._ranks, "weights": weights, **states(self._run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state


def states(run: Run) -> dict[str, list[Any]]:
    """Return the states of this rank's optimizers and schedulers.

    The state of a scheduler is ``None`` if a checkpoint cannot hold it.
    """
    of_schedulers: list[dict[str, Any]] = [
        getattr(schedule.scheduler, "state_dict", dict)() for schedule in run.schedulers
    ]
    return {
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [
            state if state and not_plain(state) is None else None for state in of_schedulers
        ],
    }


def give_states(run: Run, kept: Mapping[str, list[Any]]) -> None:
    """Load states that :func:`states` returned into the optimizers and schedulers."""
    for optimizer, state in zip(run.optimizers, kept["optimizers"], strict=True):
        load_optimizer(optimizer, state)
    for schedule, state in zip(run.schedulers, kept["schedulers"], strict=True):
        if state is not None:
            schedule.scheduler.load_state_dict(state)


def refuse_closure(context: Context) -> None:
    """Raise ``UsageError`` for optimizers that need a closure, such as LBFGS."""
    if context.run.loop.needs_closure:
        raise UsageError(
            "this algorithm keeps different weights on each rank, so an optimizer that needs a "
            "closure, such as LBFGS, would call it a different number of times on each rank, and "
            "the ranks would deadlock. Fix: use another optimizer, or an algorithm that averages "
            "gradients"
        )


def frozen(context: Context) -> dict[str, nn.Parameter]:
    """Return the parameters that are in no bucket, by name."""
    return {
        name: parameter
        for name, parameter in context.run.module.named_parameters()
        if not parameter.requires_grad
    }


def refuse_unfrozen(context: Context, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ``TrainingError`` if one of the parameters, which are in no bucket, is trained now."""
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            raise TrainingError(
                f"{context.rank}: {name} needs a gradient, but needed none when training began, so "
                "it is in no bucket, and ranks would never exchange it. "
                "Fix: leave it unfrozen until on_fit_start, and freeze it there"
            )


def swap(peers: Peers, message: torch.Tensor, others: Iterable[int]) -> dict[int, torch.Tensor]:
    """Send ``message`` to other ranks of the group; return their messages, by rank.

    A rank that is named twice gets the message once. This rank may be named: it gets its own
    message.
    """
    got = {other: message if other == peers.rank else torch.empty_like(message) for other in others}
    away = {other: answer for other, answer in got.items() if other != peers.rank}
    if away:
        calls = [dist.P2POp(dist.isend, message, peers.ranks[other], peers.group) for other in away]
        calls += [
            dist.P2POp(dist.irecv, answer, peers.ranks[other], peers.group)
            for other, answer in away.items()
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    return got
