"""The hooks that ddp adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain import hookspec

if TYPE_CHECKING:
    import torch

    from geartrain import Run


@hookspec(firstresult=True)
def reduce_bucket(run: Run, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce one bucket of gradients over all ranks in place of DDP's all-reduce, e.g. compressed.

    Fired: once per bucket, during the backward of the last micro-batch.
    Arguments: ``bucket`` is a ``torch.distributed.GradBucket``; ``bucket.buffer()`` has this rank's
        gradients, flat (1-d).
    Returns: a future of the mean over ranks, of the same shape; start the work and return without
        waiting for it.
    Default: DDP's all-reduce.
    """
    raise NotImplementedError
