"""The hooks that ddp brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain import hookspec

if TYPE_CHECKING:
    import torch

    from geartrain import Run


@hookspec(firstresult=True)
def reduce_bucket(run: Run, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce one bucket of gradients over all ranks, in another way than DDP's own all-reduce: compressed, say.

    Fired: once a bucket, during the backward of the last micro-batch.
    Arguments: ``bucket`` is a ``torch.distributed.GradBucket``; ``bucket.buffer()`` is this rank's flat gradients, 1-d.
    Returns: a future of the mean over ranks, of the same shape; start the work and return, do not wait for it.
    Default: DDP's own all-reduce.
    """
    raise NotImplementedError
