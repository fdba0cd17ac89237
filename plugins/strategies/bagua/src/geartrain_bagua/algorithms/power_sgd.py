"""Send each gradient matrix as a product of two thin matrices, with error feedback.

Source: PowerSGD, Vogels et al. 2019, https://arxiv.org/abs/1905.13727
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from geartrain import Module, Plan, UsageError
from geartrain_bagua.algorithm import Algorithm, Context
from geartrain_bagua.buckets import Bucket


class LowRank:
    """A parameter's gradient as a matrix, and its state from step to step.

    Args:
        view: the gradient in its bucket; all dimensions after the first are columns.
        rank: number of columns of the thin matrices.
        seed: seed of the first ``q``, so that it is the same on every rank.
    """

    def __init__(self, view: torch.Tensor, rank: int, seed: int) -> None:
        self.view = view
        rows, columns = view.shape[0], view.numel() // view.shape[0]
        dtype = torch.promote_types(view.dtype, torch.float32)  # qr supports no shorter floats
        #: Sum of this rank's approximation errors so far; added to the next gradient.
        self.error = torch.zeros(rows, columns, dtype=dtype, device=view.device)
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(columns, rank, dtype=dtype, generator=generator)
        #: The right factor; the next power iteration starts from it.
        self.q = q.to(view.device)

    def left(self) -> torch.Tensor:
        """Add the gradient to ``error``; return this rank's left factor, ``[rows, rank]``."""
        self.error += self.view.view(self.error.shape)
        return self.error @ self.q

    def right(self, left: torch.Tensor) -> torch.Tensor:
        """Return this rank's right factor, ``[columns, rank]``.

        Args:
            left: the mean of the left factors, ``[rows, rank]``; made orthonormal here.
        """
        self.p: torch.Tensor = torch.linalg.qr(left).Q
        right: torch.Tensor = self.error.t() @ self.p
        return right

    def settle(self, right: torch.Tensor) -> None:
        """Copy the approximation into the bucket; keep its error."""
        self.q.copy_(right)
        approximation = self.p @ self.q.t()
        del self.p
        self.error -= approximation
        self.view.copy_(approximation.view(self.view.shape))


class PowerSGD(Algorithm):
    """Average gradients over all ranks; approximate matrices by one power iteration per step.

    Args:
        matrix_rank: number of columns of the thin matrices. A larger number gives a better
            approximation and more bytes to send.
        min_compression_rate: a parameter is compressed only if its thin matrices are smaller by
            more than this factor. Others, such as biases, are averaged in full.
        warmup_steps: number of first steps in which all gradients are averaged in full.

    Raises:
        UsageError: a number is out of its range.

    Source:
        Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    reduces = "gradients"
    capabilities: ClassVar[dict[str, Any]] = {"convergence": 0.1}
    #: Finished steps.
    steps = 0
    _low: Sequence[dict[str, LowRank]] = ()
    _ranks = 0
    _loaded: dict[str, Any] | None = None

    def __init__(
        self, matrix_rank: int = 2, min_compression_rate: float = 2.0, warmup_steps: int = 0
    ) -> None:
        if matrix_rank < 1:
            raise UsageError(f"matrix_rank={matrix_rank!r} must be 1 or more.")
        if min_compression_rate < 1:
            raise UsageError(
                f"min_compression_rate={min_compression_rate!r} must be 1 or more: "
                "with less, compression would send more bytes."
            )
        if warmup_steps < 0:
            raise UsageError(f"warmup_steps={warmup_steps!r} must be 0 or more steps.")
        self.matrix_rank, self.warmup_steps = matrix_rank, warmup_steps
        self.min_compression_rate = min_compression_rate

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        if plan.precision.name == "16-mixed":
            raise UsageError(
                f"{plan.strategy.label}: the algorithm 'power_sgd' adds the error of a step to the "
                "next step's gradients, but the scaler of precision 16-mixed changes their scale "
                "between steps. Fix: precision='bf16-mixed', or another algorithm"
            )

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        names = {parameter: name for name, parameter in context.run.module.named_parameters()}
        self._low = [
            {
                names[parameter]: LowRank(
                    view, self.matrix_rank, zlib.crc32(names[parameter].encode())
                )
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
                if self._worth_it(view)
            }
            for bucket in context.buckets
        ]
        self._ranks = context.everyone.size
        state, self._loaded = self._loaded, None
        if state is not None:
            self._restore(state)

    def _worth_it(self, view: torch.Tensor) -> bool:
        if view.dim() < 2 or not view.numel():
            return False
        rows, columns = view.shape[0], view.numel() // view.shape[0]
        thin = (rows + columns) * self.matrix_rank
        return (
            self.matrix_rank <= min(rows, columns)
            and thin * self.min_compression_rate < rows * columns
        )

    def reduce(self, bucket: Bucket) -> None:
        low = self._low[bucket.index].values()
        if self._ranks > 1 and (self.steps < self.warmup_steps or not low):
            self._mean_of(bucket.flat)
        elif self._ranks > 1:
            self._approximate(bucket, list(low))

    def end_step(self) -> None:
        self.steps += 1

    def _approximate(self, bucket: Bucket, low: Sequence[LowRank]) -> None:
        """Average a bucket in two collectives; the first also has all uncompressed gradients."""
        thin = {id(matrix.view) for matrix in low}
        whole = [view for view in bucket.views if id(view) not in thin]
        lefts = [matrix.left() for matrix in low]
        self._mean([*whole, *lefts])
        rights = [matrix.right(left) for matrix, left in zip(low, lefts, strict=True)]
        self._mean(rights)
        for matrix, right in zip(low, rights, strict=True):
            matrix.settle(right)

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its mean over ranks, in one collective."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._mean_of(flat)
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view(tensor.shape))

    def _mean_of(self, flat: torch.Tensor) -> None:
        flat.div_(self._ranks)  # before the sum, which could overflow in 16 bits
        dist.all_reduce(flat, group=self.context.everyone.group)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return finished steps and, for each compressed parameter, the error and right factor."""
        if not self._ranks:
            return self._loaded or {"steps": 0, "ranks": 0, "low": {}}
        low = {
            name: {"error": matrix.error, "q": matrix.q}
            for bucket in self._low
            for name, matrix in bucket.items()
        }
        return {"steps": self.steps, "ranks": self._ranks, "low": low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def _restore(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for name, matrix in (pair for bucket in self._low for pair in bucket.items()):
            kept = state["low"].get(name)
            if kept is None or kept["q"].shape != matrix.q.shape:
                continue  # the options have changed: this matrix starts from scratch
            matrix.q.copy_(kept["q"])
            if state["ranks"] == self._ranks:  # errors are per rank
                matrix.error.copy_(kept["error"])
