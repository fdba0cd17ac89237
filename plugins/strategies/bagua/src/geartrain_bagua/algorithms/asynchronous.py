"""Asynchronous model averaging: each rank trains at its own speed; a thread averages the weights.

Source: Bagua's asynchronous algorithm; see also Lian et al. 2018, https://arxiv.org/abs/1710.06952
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
    """Average weights every ``sync_interval_ms``. No rank waits for another rank's step.

    The first ``warmup_steps`` steps average gradients. Then a thread works in rounds:

    1. Copy the weights.
    2. Average the copies over all ranks.
    3. Add the difference between the average and the copy to the weights. This keeps the updates
       that training made in the meantime.

    The thread reads and writes weights only between a rank's steps and micro-batches.

    Before a validation or a checkpoint, and at the end of training, the threads of all ranks stop
    in the same round. They average once more while no rank trains. Then every rank has the same
    weights, bit by bit, so one model is validated and saved. (In Bagua the ranks' weights differ at
    these points.) The number of rounds between two steps depends on time, so no two runs are equal.

    Args:
        peer_selection_mode: ``"all"``: the mean over all ranks. It is the only mode.
        sync_interval_ms: milliseconds between two rounds.
        warmup_steps: number of first steps that average gradients.

    Raises:
        UsageError: the mode is unknown, the interval is not above 0, or ``warmup_steps`` is
            negative.

    Source:
        Bagua's asynchronous model average; Lian et al. 2018, https://arxiv.org/abs/1710.06952
    """

    capabilities: ClassVar[dict[str, Any]] = {
        "identical_weights": False,
        "weighted_loss": False,
        "unused_parameters": True,
        "convergence": 0.15,
    }
    #: Finished training steps; evaluation does not count.
    steps = 0
    #: Finished rounds.
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
                f"peer_selection_mode={peer_selection_mode!r} is unknown. "
                "Fix: use 'all', the only mode of algorithm='async'"
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
        """True after the warm-up."""
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

    # --- training thread --------------------------------------------------------------------------

    def start_step(self) -> None:
        refuse_unfrozen(self.context, self._frozen)
        if self._running is not None and self._running.done():
            self._running.result()  # raises: during training the thread ends only by an error
            return
        context = self.context
        if self._running is None and self.warm and context.buckets and context.everyone.size > 1:
            device = context.buckets[0].flat.device
            self._thread = self._thread or Channel(device, "geartrain-bagua-async")
            self._stop.clear()
            training = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._running = self._thread.submit(partial(self._communicate, training))

    def computing(self) -> AbstractContextManager[Any]:
        return self._turns.training()

    def reduce(self, bucket: Bucket) -> None:
        everyone = self.context.everyone
        dist.all_reduce(bucket.flat.div_(everyone.size), group=everyone.group)

    def end_step(self) -> None:
        self.steps += 1
        self.reduces = None if self.warm else "gradients"

    def pause(self) -> None:
        # Ranks pause and resume at the same points, so they need not agree on more. Until the
        # slowest rank pauses, rounds continue and average its weights too.
        self._stop.set()
        running, self._running = self._running, None
        if running is not None:
            # A plugin may save in on_step_end; the last round must not wait for the hook's end.
            with self._turns.given_up():
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
        """Return the number of steps and the states of this rank's optimizers and schedulers.

        Weights are not included: in a checkpoint all ranks have the same.
        """
        if self._run is None:
            return self._loaded or {"steps": 0}
        return {"steps": self.steps, **states(self._run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    # --- communication thread ---------------------------------------------------------------------

    @torch.no_grad()
    def _communicate(self, training: torch.cuda.Stream | None) -> None:
        """Run rounds until all ranks want to stop, then the last round."""
        everyone = self.context.everyone
        # Its own, because gradients of the warm-up may still be parts of the others.
        buckets = [Bucket(bucket.index, bucket.parameters) for bucket in self.context.buckets]
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
                        bucket.give_weights()  # no rank trains now: all ranks take the same bits
                    else:
                        _shift(bucket, copy)
            self.rounds += 1
            if last:
                return
            self._stop.wait(self.interval)

    @contextmanager
    def _turn(self, training: torch.cuda.Stream | None) -> Iterator[None]:
        """Hold the communication thread's turn.

        On CUDA this thread uses another stream than training. The streams wait for each other, so
        the CPU does not wait.
        """
        with self._turns.communication():
            if training is not None:
                torch.cuda.current_stream(training.device).wait_stream(training)
            yield
            if training is not None:
                training.wait_stream(torch.cuda.current_stream(training.device))


def _shift(bucket: Bucket, copy: torch.Tensor) -> None:
    """Add the difference between the average in ``bucket.flat`` and ``copy`` to the weights."""
    bucket.flat.sub_(copy)
    for parameter, by in zip(bucket.parameters, bucket.views, strict=True):
        parameter.add_(by)
