"""Find a rank that has changed alone what all ranks should have in common."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from geartrain import Run, TrainingError

#: Bytes of an element -> the integers of that size.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check(run: Run, begins: bool) -> None:
    """Compare what ranks have in common: frozen parameters, optimizers' options and weights.

    It costs one collective of two numbers, and reads the weights once.

    Args:
        run: this rank's run.
        begins: True before training: every rank then gets the weights of rank 0, as before
            ``wrap_model``. A hook of the user may have set them since.

    Raises:
        TrainingError: a rank differs; on every rank, with the rank and the first differences.
    """
    # Ranks with weights of their own may skip steps alone in 16-mixed, and so those of a scheduler.
    is_alike = run.hooks.strategy_can("identical_weights")
    weights = _whole_weights(run) if is_alike else {}
    facts, sums = {**_frozen(run), **_changes(run)}, _sums(weights)
    facts |= _options(run) if is_alike else {}
    pair = [zlib.crc32(repr(part).encode()) for part in (facts, sums)]
    local = torch.tensor(pair, dtype=torch.float64)
    digests = run.hooks.log_sync(run=run, values=local).tolist()
    most = max(digests, key=digests.count)  # the first of these, if several are as frequent
    usual, other = digests.index(most), next((i for i, d in enumerate(digests) if d != most), None)
    if other is None:
        return
    if begins and all(settings == most[0] for settings, _ in digests):
        _copy_of_rank_0(run, weights)
        return
    facts |= sums
    expected, actual = (
        run.hooks.broadcast(run=run, obj=facts if run.world.rank == rank else None, src=rank)
        for rank in (usual, other)
    )
    names = [n for n in {**expected, **actual} if expected.get(n) != actual.get(n)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    differences = "; ".join(_difference(n, expected.get(n), actual.get(n)) for n in names[:3])
    raise TrainingError(
        f"rank {other} differs from rank {usual}: {differences}{more}. "
        "Fix: change weights, learning rates and requires_grad on every rank, in the same way"
    )


def _difference(name: str, expected: Any, actual: Any) -> str:
    shown = not name.startswith("the weight ") and None not in (expected, actual)
    return f"{name} is {actual!r}, not {expected!r}" if shown else name


def _frozen(run: Run) -> dict[str, Any]:
    named = run.module.named_parameters(remove_duplicate=False)  # a rank may name one twice
    return {f"requires_grad of {name}": parameter.requires_grad for name, parameter in named}


def _changes(run: Run) -> dict[str, Any]:
    """Return how often weights were changed of which each rank has a part."""
    named = run.module.named_parameters()
    return {f"the number of changes of {n}": p._version for n, p in named if _is_part(p)}


def _is_part(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "device_mesh")


def _options(run: Run) -> dict[str, Any]:
    return {
        f"{key} of group {i} of optimizer {n} ({type(optimizer).__name__})": value
        for n, optimizer in enumerate(run.optimizers)
        for i, group in enumerate(optimizer.param_groups)
        for key, value in _plain(group)
    }


def _plain(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            yield key, value.tolist()
        elif value is None or isinstance(value, bool | int | float | str | tuple):
            yield key, value


def _copy_of_rank_0(run: Run, weights: dict[str, torch.Tensor]) -> None:
    for weight in weights.values():  # one at a time, to use less memory
        local = weight.cpu() if run.world.rank == 0 else None
        first = run.hooks.broadcast(run=run, obj=local, src=0)
        if run.loop.memory_checkpoint is None:  # otherwise this rank repeats what others have done
            weight.copy_(first)


def _whole_weights(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights of which each rank has all; none if some ranks have one model together."""
    if run.world.data_size < run.world.size:
        return {}
    return {
        name: parameter.detach()
        for name, parameter in run.module.named_parameters()
        if parameter.layout is torch.strided and not _is_part(parameter)
    }


def _sums(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return digests of the bits: from the same gradients and options come the same bits."""
    sums = list(map(digest, weights.values()))
    numbers = torch.stack(sums).tolist() if sums else []  # one wait for the device
    return {f"the weight {name}": number for name, number in zip(weights, numbers, strict=True)}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits for the bits of a tensor and their places, on its device."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    width = 8 // flat.element_size()
    if flat.storage_offset() % width or flat.stride(0) != 1:  # it cannot be viewed as 64 bits
        flat = flat.clone(memory_format=torch.contiguous_format)
    end = flat.numel() // width * width
    words, tail = flat[:end].view(torch.int64), flat[end:].view(_INTEGERS[flat.element_size()])
    columns = max(1, math.isqrt(len(words)))
    whole = len(words) // columns * columns
    table = words[:whole].view(-1, columns)  # sums of its rows and columns take little time
    sums = torch.cat([table.sum(0), table.sum(1), words[whole:], tail.to(torch.int64)])
    sums ^= sums >> 32  # else two words whose highest bits differ could change places
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
