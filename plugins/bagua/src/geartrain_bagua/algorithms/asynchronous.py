"""Ranks train at their own pace, and a thread averages their weights meanwhile.

Asynchronous model averaging, as Bagua has it; see also Lian et al. 2018, https://arxiv.org/abs/1710.06952
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from geartrain import Run, UsageError
from geartrain.parallel import Patience
from geartrain_bagua.algorithm import Algorithm, Context
from geartrain_bagua.algorithms.weights import (
    frozen,
    give_states,
    refuse_closure,
    refuse_unfrozen,
    states,
)
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.channel import Channel, Job
from geartrain_bagua.turns import Turns


class Asynchronous(Algorithm):
    """Average weights every ``sync_interval_ms``, whatever step each rank is at; no rank waits for another's step.

    Warm-up averages gradients. Then a thread, in rounds: it copies the weights, averages the copies over all ranks, and adds to the weights
    by how much the average differs from its copy, so that what training did meanwhile is kept. It touches weights between a rank's steps
    and micro-batches only.

    Before a validation or a checkpoint, and at the end of training, all ranks' threads stop in the same round and average once more, while
    no rank trains: then every rank has the same weights, bit by bit, and what is validated and saved is one model. (Bagua leaves ranks with
    weights of their own there.) How many rounds fall between two steps depends on time: two runs are never the same.

    Args:
        peer_selection_mode: ``"all"``: the mean over all ranks; there is no other.
        sync_interval_ms: milliseconds between two rounds.
        warmup_steps: steps that average gradients first.

    Raises:
        UsageError: another mode, an interval that is not above 0, or a negative number of steps.
    """

    capabilities: ClassVar[dict[str, Any]] = {
        "identical_weights": False,
        "unused_parameters": True,
        "convergence": 0.15,
    }
    #: Training steps done; evaluation does not count.
    steps = 0
    #: Rounds that averaged weights.
    rounds = 0
    _turns: Turns
    _thread: Channel | None = None
    _running: Job | None = None
    _run: Run | None = None
    _loaded: dict[str, Any] | None = None

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0
    ) -> None:
        if peer_selection_mode != "all":
            raise UsageError(
                f"peer_selection_mode={peer_selection_mode!r} is unknown. Fix: 'all', the only one of algorithm='async'"
            )
        if not 0 < sync_interval_ms < threading.TIMEOUT_MAX:
            raise UsageError(
                f"sync_interval_ms={sync_interval_ms!r} must be a number of milliseconds above 0."
            )
        if warmup_steps < 0:
            raise UsageError(f"warmup_steps={warmup_steps!r} must be 0 or more steps.")
        self.interval = sync_interval_ms / 1000
        self.warmup_steps = warmup_steps

    @property
    def warm(self) -> bool:
        """Whether warm-up is over."""
        return self.steps >= self.warmup_steps

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        self._unwind = Patience.from_environment().unwind
        refuse_closure(context)
        self._run, state, self._loaded = context.run, self._loaded, None
        if state is not None:
            self.steps = state["steps"]
            give_states(context.run, state)
        self.reduces = None if self.warm else "gradients"
        self._frozen = frozen(context)
        self._turns, self._stop, self._leave = Turns(), threading.Event(), threading.Event()

    # --- training's thread -----------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        refuse_unfrozen(self._frozen)
        if self._running is not None and self._running.done():
            self._running.result()  # it failed: nothing else ends it while training goes on
        elif (
            self._running is None
            and self.warm
            and self.context.buckets
            and self.context.everyone.size > 1
        ):
            device = self.context.buckets[0].flat.device
            self._thread = self._thread or Channel(device, "geartrain-bagua-async")
            self._stop.clear()
            training = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._running = self._thread.submit(partial(self._communicate, training))

    def computing(self) -> AbstractContextManager[Any]:
        return self._turns.training()

    def reduce(self, bucket: Bucket) -> None:
        dist.all_reduce(
            bucket.flat.div_(self.context.everyone.size), group=self.context.everyone.group
        )

    def end_step(self) -> None:
        self.steps += 1
        self.reduces = None if self.warm else "gradients"

    def pause(self) -> None:
        # Nothing else is to be agreed on: ranks pause and resume at the same points, and a rank that comes late is averaged until then.
        self._stop.set()
        running, self._running = self._running, None
        if running is not None:
            with (
                self._turns.given_up()
            ):  # a checkpoint may be saved in on_step_end: the last round must not wait for its end
                running.result()

    def close(self, failed: bool) -> None:
        try:
            if not failed:
                self.pause()
        finally:
            self._leave.set()
            self._stop.set()
            if self._thread is not None:
                # A thread inside a collective can make the interpreter's end crash.
                self._thread.close(self._unwind)

    def state_dict(self) -> dict[str, Any]:
        """Training steps, and this rank's optimizers and schedulers; weights are everybody's in a checkpoint."""
        if self._run is None:
            return self._loaded or {"steps": 0}
        return {"steps": self.steps, **states(self._run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    # --- communication's thread ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _communicate(self, training: torch.cuda.Stream | None) -> None:
        """Rounds until all ranks want to stop, and then the last one."""
        everyone, buckets = self.context.everyone, self.context.buckets
        copies = [torch.empty_like(bucket.flat) for bucket in buckets]
        flag = torch.zeros(1, dtype=torch.int32, device=buckets[0].flat.device)
        while not self._leave.is_set():
            flag.fill_(int(self._stop.is_set()))
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=everyone.group)
            last = bool(flag.item())
            with self._turn(training):
                for bucket, copy in zip(buckets, copies, strict=True):
                    copy.copy_(bucket.take_weights())
            for bucket in buckets:
                dist.all_reduce(bucket.flat, group=everyone.group)
                bucket.flat.div_(everyone.size)
            with self._turn(training):
                for bucket, copy in zip(buckets, copies, strict=True):
                    if last:
                        bucket.give_weights()  # nobody trains: all ranks take the same bits
                    else:
                        _shift(bucket, copy)
            self.rounds += 1
            if last:
                return
            self._stop.wait(self.interval)

    @contextmanager
    def _turn(self, training: torch.cuda.Stream | None) -> Iterator[None]:
        """Communication's turn. On CUDA, where it has a stream of its own, the streams keep to turns as well, and the CPU does not wait."""
        with self._turns.communication():
            if training is not None:
                torch.cuda.current_stream(training.device).wait_stream(training)
            yield
            if training is not None:
                training.wait_stream(torch.cuda.current_stream(training.device))


def _shift(bucket: Bucket, copy: torch.Tensor) -> None:
    """Add to the weights by how much their average differs from the copy of which it was taken."""
    bucket.flat.sub_(copy)
    for parameter, by in zip(bucket.parameters, bucket.views, strict=True):
        parameter.add_(by)
