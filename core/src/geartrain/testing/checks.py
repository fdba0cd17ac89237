"""Comparisons of what ranks and one process came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from geartrain.testing.kit import Kit, Report

#: Float64 sums in another order differ in the last of 16 digits; a few dozen steps, and Adam's division by small numbers, make that
#: a thousand times more. Anything computed wrongly differs in the first digits.
RTOL, ATOL = 1e-8, 1e-10


def equals_one_process(kit: Kit, scenario: str, number: int = 0) -> None:
    """Loss curve, metrics, counters and weights of the ``number``-th fit are those of one process; approximate strategies come close.

    Raises:
        AssertionError: what differs, and by how much.
    """
    ours, one = kit.report(scenario).ranks("fit", number), kit.reference(scenario).ranks("fit", number)[0]
    curve, expected = ours[0]["curve"], one["curve"]
    assert len(expected) > 1
    assert len(curve) == len(expected), f"{len(curve)} steps were logged on rank 0, and {len(expected)} in one process"
    if kit.can.convergence is not None:
        most = expected[-1] + kit.can.convergence * expected[0]
        assert curve[-1] <= most, f"the loss ends at {curve[-1]}; with convergence={kit.can.convergence} it may end at {most}"
        return
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=RTOL, atol=ATOL, msg=_say(curve, expected))
    for record in ours:
        assert (record["step"], record["epoch"]) == (one["step"], one["epoch"]), "other counters than in one process"
        assert_same_weights(record["weights"], one["weights"], f"rank {record['rank']}", "one process")
        difference = abs(record["metrics"]["loss_epoch"] - one["metrics"]["loss_epoch"])
        assert difference <= RTOL + ATOL, f"loss_epoch on rank {record['rank']} differs from one process's by {difference}"


def _say(curve: list[float], expected: list[float]) -> str:
    step = next((i for i, (a, b) in enumerate(zip(curve, expected, strict=True)) if abs(a - b) > ATOL + RTOL * abs(b)), 0)
    return (
        f"the loss differs from one process's from step {step} on: {curve[step]!r}, expected {expected[step]!r}\n"
        f"rank 0:      {curve}\none process: {expected}"
    )


def assert_same_weights(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str, than: str) -> None:
    """Two state_dicts are equal but for the order of additions.

    Raises:
        AssertionError: the parameter that differs most.
    """
    assert mine.keys() == theirs.keys()
    off = {name: float((tensor - theirs[name]).abs().max()) for name, tensor in mine.items() if tensor.is_floating_point()}
    wrong = {name: by for name, by in off.items() if not torch.allclose(mine[name], theirs[name], rtol=RTOL, atol=ATOL)}
    assert not wrong, f"{whose} has other weights than {than}; largest difference by name: {wrong}"


def identical_on_ranks(report: Report, command: str = "fit", number: int = 0) -> None:
    """Weights and buffers are the same, bit by bit, on all ranks.

    Raises:
        AssertionError: the tensor and the rank that differ.
    """
    first, *others = report.ranks(command, number)
    for record in others:
        for name, tensor in first["weights"].items():
            assert torch.equal(tensor, record["weights"][name]), (
                f"{name} on rank {record['rank']} differs from rank 0's by {float((tensor - record['weights'][name]).abs().max())}"
            )


def numbers(record: Mapping[str, Any], stage: str, epoch: int = 0) -> list[int]:
    """The samples that a rank saw in a stage, in its order."""
    return [number for batch in record["seen"].get(f"{stage}-{epoch}", []) for number in batch]
