"""Send gradients to the communication thread during the backward of the last micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from geartrain import TrainingError
from geartrain_bagua.algorithm import Algorithm, Context
from geartrain_bagua.channel import Job


class GradientReducer:
    """Start the reduction of each bucket, in order, when its gradients and all earlier ones exist.

    A context manager around the forward and backward of a step's last micro-batch.

    Args:
        context: the algorithm's context.
        algorithm: its ``reduce`` is called for each bucket.
        names: every parameter of the module, by name; those in no bucket must not get gradients.
        unused: if True, a step may leave parameters unused; this costs one collective per step.
    """

    def __init__(
        self,
        context: Context,
        algorithm: Algorithm,
        names: Mapping[str, nn.Parameter],
        unused: bool,
    ) -> None:
        self._context, self._algorithm, self._unused = context, algorithm, unused
        self._buckets = context.buckets
        self._names = {parameter: name for name, parameter in names.items()}
        self._parameters = [
            parameter for bucket in self._buckets for parameter in bucket.parameters
        ]
        parameters = set(self._parameters)
        self._others = [parameter for parameter in names.values() if parameter not in parameters]
        self._counts = [len(bucket.parameters) for bucket in self._buckets]
        #: True during the last micro-batch, when gradients are reduced.
        self._armed = False
        #: For each bucket, the number of gradients that are still missing.
        self._waiting = list(self._counts)
        #: Numbers of the parameters whose gradients exist.
        self._came = set[int]()
        #: The next bucket to submit.
        self._next = 0
        self._jobs: list[Job] = []
        #: Gradients that were sent during backward: parameter, gradient and the gradient's version
        #: at the end of backward. In-place changes increase the version.
        self._sent: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._will_note = False
        pairs = [(bucket, parameter) for bucket in self._buckets for parameter in bucket.parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket.index, number))  # type: ignore[no-untyped-call]
            for number, (bucket, parameter) in enumerate(pairs)
        ]

    def __enter__(self) -> None:
        if self._algorithm.reduces is not None:
            self._armed, self._waiting, self._next = True, list(self._counts), 0
            self._will_note = False
            for of_last_step in (self._came, self._jobs, self._sent):
                of_last_step.clear()

    def __exit__(self, *error: object) -> None:
        self._armed = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._jobs, self._sent = [], [], []

    def finish(self) -> None:
        """Wait until all buckets are reduced, and make the results the gradients.

        Raises:
            TrainingError: a parameter has no gradient, but all must have one; a parameter in no
                bucket has a gradient; a gradient was changed after it was sent.
        """
        if self._algorithm.reduces is None:
            return
        self._refuse_changed()
        complete = len(self._came) == len(self._parameters)
        if self._others and any(parameter.grad is not None for parameter in self._others):
            self._refuse_unfrozen()
        if not complete and not self._unused:
            self._refuse_unused()
        while self._next < len(self._buckets):
            self._submit()
        flags = self._find_used() if self._unused else None
        for bucket, job in zip(self._buckets, self._jobs, strict=True):
            job.result()
            if flags is None:
                bucket.give_gradients()
        if flags is not None:
            self._give_used([bool(flag) for flag in flags.result().tolist()])
        self._jobs.clear()
        self._sent.clear()

    def _hook(self, index: int, number: int) -> Callable[[nn.Parameter], None]:
        """Return the hook that backward calls when a parameter's gradient is complete."""

        def came(parameter: nn.Parameter) -> None:
            if not self._armed:
                return
            if number in self._came:
                raise TrainingError(
                    f"{self._context.rank}: {self._names[parameter]} got its gradient twice in one "
                    "step; the first may have been sent already. Fix: call backward once in each "
                    "training_step, and pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._came.add(number)
            self._waiting[index] -= 1
            while self._next < len(self._waiting) and not self._waiting[self._next]:
                self._submit()
                if not self._will_note:
                    self._will_note = True
                    # At the end of backward: gradients may be views of one tensor, with a common
                    # version that changes when the next one is accumulated.
                    torch.autograd.Variable._execution_engine.queue_callback(self._note_sent)

        return came

    def _note_sent(self) -> None:
        """Note the versions of the sent gradients, at the end of backward."""
        self._will_note = False
        sent = [
            parameter for bucket in self._buckets[: self._next] for parameter in bucket.parameters
        ]
        self._sent = [
            (parameter, parameter.grad, getattr(parameter.grad, "_version", 0))
            for parameter in sent
        ]

    def _submit(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.take_gradients()
        self._jobs.append(self._context.channel.submit(partial(self._algorithm.reduce, bucket)))

    def _find_used(self) -> Job:
        """Find the parameters that have a gradient on any rank: the result has 1 or 0 for each."""
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=self._context.run.device)
        group = self._context.everyone.group

        def any_rank() -> torch.Tensor:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            return flags

        return self._context.channel.submit(any_rank)

    def _give_used(self, used: Sequence[bool]) -> None:
        """Give gradients to the parameters that any rank has used."""
        for parameter, by_any in zip(self._parameters, used, strict=True):
            if by_any and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self._buckets:
            bucket.give_gradients()

    def _refuse_changed(self) -> None:
        for parameter, grad, version in self._sent:
            if parameter.grad is not grad or getattr(grad, "_version", 0) != version:
                raise TrainingError(
                    f"{self._context.rank}: the gradient of {self._names[parameter]} was changed "
                    "after it was sent to the other ranks, and would be overwritten. Fix: change "
                    "gradients in on_before_optimizer_step, after they are reduced"
                )

    def _refuse_unused(self) -> None:
        # A parameter that was frozen after the start has no gradient on any rank.
        unused = {p for p in self._parameters if p.grad is None and p.requires_grad}
        missing = [name for parameter, name in self._names.items() if parameter in unused]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise TrainingError(
                f"{self._context.rank} did not use these parameters in a step: "
                f"{', '.join(missing[:5])}{more}. Fix: --strategy.find_unused_parameters true"
            )

    def _refuse_unfrozen(self) -> None:
        name = next(self._names[other] for other in self._others if other.grad is not None)
        raise TrainingError(
            f"{self._context.rank}: {name} got a gradient, but needed none when training began, so "
            "it is in no bucket and would differ between ranks. "
            "Fix: leave it unfrozen until on_fit_start, and freeze it there"
        )
