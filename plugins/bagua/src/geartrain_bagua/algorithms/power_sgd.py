"""Gradients of matrices travel as the product of two thin ones: a single power iteration a step, with error feedback.

PowerSGD: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
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
    """A parameter's gradient as a matrix, and what is kept of it from step to step.

    Args:
        view: where the gradient lies in its bucket; all dimensions after the first are columns.
        rank: columns of the thin matrices.
        seed: of the first ``q``, which is the same on every rank.
    """

    def __init__(self, view: torch.Tensor, rank: int, seed: int) -> None:
        self.view = view
        rows, columns = view.shape[0], view.numel() // view.shape[0]
        dtype = torch.promote_types(view.dtype, torch.float32)  # qr knows no shorter floats
        #: What this rank's gradients had and the approximations left out, so far: added to the next one.
        self.error = torch.zeros(rows, columns, dtype=dtype, device=view.device)
        #: The right factor; the last step's is where the next power iteration starts.
        self.q = torch.randn(
            columns, rank, dtype=dtype, generator=torch.Generator().manual_seed(seed)
        ).to(view.device)

    def left(self) -> torch.Tensor:
        """This rank's left factor, ``[rows, rank]``. ``error`` then has all that should be sent."""
        self.error += self.view.view(self.error.shape)
        return self.error @ self.q

    def right(self, left: torch.Tensor) -> torch.Tensor:
        """This rank's right factor, ``[columns, rank]``, for the mean of the left ones, made orthonormal."""
        self.p: torch.Tensor = torch.linalg.qr(left).Q
        right: torch.Tensor = self.error.t() @ self.p
        return right

    def settle(self, right: torch.Tensor) -> None:
        """Put the approximation into the bucket; keep what it left out."""
        self.q.copy_(right)
        approximation = self.p @ self.q.t()
        del self.p
        self.error -= approximation
        self.view.copy_(approximation.view(self.view.shape))


class PowerSGD(Algorithm):
    """Average gradients over all ranks, those of matrices approximately.

    Args:
        matrix_rank: columns of the thin matrices. More is closer to the gradient, and more to send.
        min_compression_rate: parameters for which the thin matrices would not be smaller by more than this factor, biases among them,
            are averaged as they are.
        warmup_steps: steps at the beginning in which all are.

    Raises:
        UsageError: a number out of its range.
    """

    reduces = "gradients"
    capabilities: ClassVar[dict[str, Any]] = {"convergence": 0.1}
    #: Steps done.
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
                f"min_compression_rate={min_compression_rate!r} must be 1 or more: less would send more than there is."
            )
        if warmup_steps < 0:
            raise UsageError(f"warmup_steps={warmup_steps!r} must be 0 or more steps.")
        self.matrix_rank, self.min_compression_rate, self.warmup_steps = (
            matrix_rank,
            min_compression_rate,
            warmup_steps,
        )

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        if plan.precision.name == "16-mixed":
            raise UsageError(
                f"{plan.strategy.label}: the algorithm 'power_sgd' carries over what it left out of a step's gradients, and the scaler of "
                "precision 16-mixed changes their scale between steps. Fix: precision='bf16-mixed', or another algorithm"
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
        """Two collectives: one for all left factors and what is sent as it is, one for all right factors."""
        thin = {id(matrix.view) for matrix in low}
        whole = [view for view in bucket.views if id(view) not in thin]
        lefts = [matrix.left() for matrix in low]
        self._mean([*whole, *lefts])
        rights = [matrix.right(left) for matrix, left in zip(low, lefts, strict=True)]
        self._mean(rights)
        for matrix, right in zip(low, rights, strict=True):
            matrix.settle(right)

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor's mean over ranks, in place, in one collective."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._mean_of(flat)
        for tensor, mean in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(mean.view(tensor.shape))

    def _mean_of(self, flat: torch.Tensor) -> None:
        flat.div_(self._ranks)  # first: 16 bits could not hold the sum
        dist.all_reduce(flat, group=self.context.everyone.group)

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Steps done, and by parameter this rank's error and the right factor."""
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
        for name, matrix in (
            (name, matrix) for bucket in self._low for name, matrix in bucket.items()
        ):
            kept = state["low"].get(name)
            if kept is None or kept["q"].shape != matrix.q.shape:
                continue  # other options than before: this matrix begins anew
            matrix.q.copy_(kept["q"])
            if (
                state["ranks"] == self._ranks
            ):  # otherwise errors are of ranks that are no longer there
                matrix.error.copy_(kept["error"])
