"""Collectives on torch.distributed's default process group."""

from __future__ import annotations

import ctypes
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from geartrain import TrainingError, UsageError
from geartrain_parallel import headers, sealed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from geartrain import Run

#: The error for a gradient that is sparse.
SPARSE = "sparse gradients cannot be averaged over ranks here. Fix: sparse=False in nn.Embedding"
#: Bytes of gradients that one all-reduce carries, as DDP's buckets do.
_BUCKET = 25 * 2**20


def group(run: Run) -> None:
    """Check that a process group exists.

    Raises:
        TrainingError: the strategy has several ranks but made none.
    """
    if not dist.is_initialized():
        raise TrainingError(
            f"{run.plan.strategy.label} has {run.world.size} ranks and no torch.distributed "
            "process group. Fix: make one in setup_process_group, or override log_sync, "
            "all_gather, broadcast and barrier"
        )


def of_data_ranks(run: Run, rows: Any) -> Any:
    """Return the rows of ranks with different data, of a table or list with one of each rank."""
    return rows[:: run.world.size // run.world.data_size]


def gather_values(run: Run, values: torch.Tensor) -> torch.Tensor:
    """Implement ``log_sync``: ``[n]`` on the CPU -> ``[world_size, n]`` on the CPU."""
    group(run)
    few = len(values) * values.element_size() <= headers.CONTENT // 2
    numbers = values.tolist() if few else None
    rows = headers.meet(run, f"log_sync of {len(values)} numbers", numbers)
    if few:
        return torch.tensor(rows, dtype=values.dtype)
    local = values.to(run.device)
    table = [torch.empty_like(local) for _ in range(run.world.size)]
    dist.all_gather(table, local)
    return torch.stack(table).cpu()


def broadcast_object(run: Run, obj: Any, src: int) -> Any:
    """Return the object of rank ``src``, on every rank; this implements the hook ``broadcast``.

    torch's ``broadcast_object_list`` needs NumPy, which torch does not install.
    """
    group(run)
    is_source = run.world.rank == src
    # A header is sealed as a whole.
    pickled = pickle.dumps(obj) if is_source else b""
    content = pickled if len(pickled) <= headers.CONTENT else len(pickled)
    sent = headers.meet(run, f"broadcast from rank {src}", content)[src]
    if isinstance(sent, bytes):
        return obj if is_source else pickle.loads(sent)
    data = (
        torch.frombuffer(bytearray(sealed.seal(pickled)), dtype=torch.uint8).to(run.device)
        if is_source
        else torch.empty(sealed.SIZE + sent, dtype=torch.uint8, device=run.device)
    )
    dist.broadcast(data, src)
    data = data.cpu()
    if is_source:
        return obj
    return pickle.loads(sealed.unseal(ctypes.string_at(data.data_ptr(), len(data))))


def broadcast_weights(run: Run, model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, in place.

    Ranks that start with different weights would keep different weights, without an error.
    """
    group(run)
    # Not state_dict(), which lacks the buffers that are not persistent.
    for tensor in (*model.parameters(), *model.buffers()):
        same = tensor.detach().contiguous()
        dist.broadcast(same, src=0)
        if same.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(same)


def refuse_sparse(run: Run) -> None:
    """Raise if a ``fit`` has a table with sparse gradients, which are not averaged over ranks here.

    torch's DDP would average them, and divide some other gradients twice. Call it before a rank
    starts and, since ``setup()`` of the module may make a table, before the model is wrapped.

    Raises:
        UsageError: an embedding has ``sparse=True``.
    """
    for name, part in run.module.named_modules() if run.command == "fit" else ():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and part.weight.requires_grad:
            raise UsageError(
                f"{run.plan.strategy.label}: {name} is {type(part).__name__}(sparse=True), and "
                f"{SPARSE}"
            )


@torch.no_grad()
def average_gradients(
    run: Run,
    parameters: Sequence[nn.Parameter],
    changed: Sequence[bool],
    process_group: dist.ProcessGroup | None = None,
) -> list[nn.Parameter]:
    """Replace gradients by their mean over ranks, in place.

    If a rank has no gradient where another rank has one, it contributes zeros and gets the mean.
    Ranks first agree on the gradients to average, because unequal collectives would hang. The CPU
    waits for the device here.

    Args:
        run: this rank's run.
        parameters: the same parameters on every rank, in the same order.
        changed: for each parameter, true if this rank has a gradient to average. A gradient is
            averaged if any rank has one.
        process_group: the ranks; default: all.

    Returns:
        The parameters whose gradients were averaged.

    Raises:
        TrainingError: a gradient is sparse.
    """
    group(run)
    headers.announce_reduction(run)
    named = torch.tensor(changed, dtype=torch.int32, device=run.device)
    dist.all_reduce(named, op=dist.ReduceOp.MAX, group=process_group)
    averaged = [
        parameter for parameter, by_any in zip(parameters, named.tolist(), strict=True) if by_any
    ]
    buckets: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in averaged:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.layout is not torch.strided:
            raise TrainingError(f"{run.plan.strategy.label}: {SPARSE}")
        kind = (grad.dtype, grad.device)
        buckets.setdefault((*kind, filled.get(kind, 0) // _BUCKET), []).append(grad)
        filled[kind] = filled.get(kind, 0) + grad.numel() * grad.element_size()
    size = dist.get_world_size(process_group)
    for grads in buckets.values():
        # Divide first, as DDP does, because the sum may overflow in 16 bits.
        flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(size)
        dist.all_reduce(flat, group=process_group)
        means = torch.split(flat, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))
    return averaged


def wait_for_all(run: Run) -> None:
    """Wait until every rank is here; this implements the hook ``barrier``."""
    group(run)
    headers.meet(run, "barrier")


def gather_uneven(run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    """Return the tensors of all ranks; this implements the hook ``all_gather``.

    The first dimensions may differ between ranks.

    Returns:
        ``[world_size, *shape]``, or a list with one tensor per rank if the first dimensions differ.

    Raises:
        TrainingError: other dimensions or the types differ.
    """
    group(run)
    tensor = tensor.detach().to(run.device).contiguous()
    # Exchange sizes first, because unequal sizes make gloo call terminate(), which Python cannot
    # catch. The header has room for torch's maximum of 64 dimensions.
    rows = headers.meet(run, "all_gather", (str(tensor.dtype), array("q", tensor.shape).tobytes()))
    shapes = [array("q", shape).tolist() for _, shape in rows]
    refuse_unequal(shapes, [dtype for dtype, _ in rows], tensor.dtype)
    if tensor.ndim == 0 or len({shape[0] for shape in shapes}) == 1:
        table = [torch.empty_like(tensor) for _ in shapes]
        dist.all_gather(table, tensor)
        return torch.stack(table)
    longest = max(shape[0] for shape in shapes)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    table = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(table, padded)
    return [part[: shape[0]] for part, shape in zip(table, shapes, strict=True)]


def refuse_unequal(
    shapes: Sequence[Sequence[int]], kinds: Sequence[Any], mine: torch.dtype
) -> None:
    """Refuse tensors that ``all_gather`` cannot combine.

    Args:
        shapes: the shapes, by rank.
        kinds: the types, by rank, in any form that can be compared.
        mine: this rank's type.

    Raises:
        TrainingError: types differ, or shapes differ in more than the first dimension.
    """
    first = list(shapes[0])
    for rank, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        if kind != kinds[0]:
            raise TrainingError(
                f"all_gather: rank 0 and rank {rank} have tensors of different types; "
                f"this rank's is {mine}."
            )
        lengths = list(shape)
        if len(lengths) != len(first) or lengths[1:] != first[1:]:
            raise TrainingError(
                f"all_gather: rank 0 has the shape {first} and rank {rank} {lengths}; "
                "only the first dimension may differ."
            )


@contextmanager
def name_absent_ranks(run: Run) -> Iterator[None]:
    """Name the missing ranks if the code inside cannot make a process group.

    Raises:
        TrainingError: ranks are missing; the message has their numbers.
    """
    place, store = run.cluster, run.store
    assert place is not None
    assert store is not None
    try:
        store.set(f"here/{place.rank}", "1")
        yield
    except (dist.DistError, RuntimeError) as error:
        missing = [rank for rank in range(place.size) if not _came(store, rank)]
        if not missing:
            raise
        raise TrainingError(
            f"ranks {missing} of {place.size} did not come: {str(error).splitlines()[0]}. "
            "Fix: start them, on every node"
        ) from error


def _came(store: Store, rank: int) -> bool:
    try:
        return bool(store.check([f"here/{rank}"]))
    except (dist.DistError, RuntimeError):
        return True  # rank 0, which serves the store, has gone: nothing is known of the others
