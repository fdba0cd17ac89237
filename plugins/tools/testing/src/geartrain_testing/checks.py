"""Comparisons of the results of ranks and of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from geartrain_testing.capabilities import MOST
from geartrain_testing.kit import Kit, Report, fits
from geartrain_testing.nets import STEPS

#: Float64 sums in another order differ in the last of 16 digits. A few dozen steps, and Adam's
#: division by small numbers, multiply this by 1,000. A wrong result differs in the first digits.
RTOL, ATOL = 1e-8, 1e-10
#: The same for a strategy that trains in float32, whose sums differ in the last of 7 digits.
FLOAT32 = 1e-5, 1e-6
#: An entry that has changed by more than this was trained, not rounded.
MOVED = 1e-3


def equals_one_process(kit: Kit, scenario: str, number: int = 0) -> None:
    """Check that loss curve, metrics, counters and weights of a fit equal those of one process.

    Approximate strategies must come close.

    Args:
        number: the number of the fit in the scenario, from 0.

    Raises:
        AssertionError: they differ; the message has the differences and the capability to declare.
    """
    ours = kit.report(scenario).ranks("fit", number)
    one = kit.reference(scenario).ranks("fit", number)[0]
    curve, expected = ours[0]["curve"], one["curve"]
    assert len(expected) > 1
    assert len(curve) == len(expected), (
        f"rank 0 logged {len(curve)} steps, and one process {len(expected)}"
    )
    bound = kit.can.convergence
    for record in ours:
        found, wanted = (record["step"], record["epoch"]), (one["step"], one["epoch"])
        assert found == wanted, (
            f"rank {record['rank']} counts {found} steps and epochs, and one process {wanted}"
        )
    if bound is not None:
        most, fit = expected[-1] + bound * expected[0], _convergence(kit, ours, expected)
        assert curve[-1] <= most, (
            f"the loss ends at {curve[-1]}; with convergence={bound} it may end at {most}{fit}"
        )
        means = [record["metrics"]["loss_epoch"] for record in ours]
        most = one["metrics"]["loss_epoch"] + bound * expected[0]
        assert max(means) - min(means) <= ATOL, (
            f"loss_epoch is not the same on all ranks; by rank: {means}"
        )
        assert means[0] <= most, (
            f"loss_epoch is {means[0]}; with convergence={bound} it may be {most}"
        )
        return
    rtol, atol = tolerances(kit)
    off = differing(ours[0]["weights"], one["weights"], rtol, atol)
    say = (
        f"{_say(curve, expected, rtol, atol)}\n"
        f"weights on rank 0 that differ, with the difference: {off}"
        f"{_convergence(kit, ours, expected)}"
    )
    torch.testing.assert_close(
        torch.tensor(curve), torch.tensor(expected), rtol=rtol, atol=atol, msg=say
    )
    for record in ours:
        equal_weights(kit, record, one, f"rank {record['rank']}")
        difference = abs(record["metrics"]["loss_epoch"] - one["metrics"]["loss_epoch"])
        assert difference <= rtol + atol, (
            f"loss_epoch on rank {record['rank']} differs from one process's by {difference}"
        )


def _say(curve: list[float], expected: list[float], rtol: float, atol: float) -> str:
    pairs = enumerate(zip(curve, expected, strict=True))
    step = next((i for i, (a, b) in pairs if abs(a - b) > atol + rtol * abs(b)), 0)
    return (
        f"the loss differs from one process's from step {step}: "
        f"{curve[step]!r}, expected {expected[step]!r}\n"
        f"rank 0:      {curve}\none process: {expected}"
    )


def tolerances(kit: Kit) -> tuple[float, float]:
    """Return the relative and the absolute difference that the strategy's weights may have."""
    return (RTOL, ATOL) if kit.can.float64 else FLOAT32


def equal_weights(
    kit: Kit, record: Mapping[str, Any], reference: Mapping[str, Any], whose: str
) -> None:
    """Check that a rank has the weights of one process, up to the order of additions.

    Args:
        record: of the rank.
        reference: the record of one process.
        whose: the rank, for the message.

    Raises:
        AssertionError: they differ; the message has the largest difference of each tensor.
    """
    found, expected = record["weights"], reference["weights"]
    assert found.keys() == expected.keys()
    wrong = differing(found, expected, *tolerances(kit))
    assert not wrong, f"{whose} has other weights than one process; largest differences: {wrong}"


def differing(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], rtol: float = RTOL, atol: float = ATOL
) -> dict[str, float]:
    """Return the largest difference of each tensor that is not the same in two state_dicts."""
    return {
        name: float((tensor.double() - theirs[name].double()).abs().max())
        for name, tensor in mine.items()
        if not torch.allclose(tensor, theirs[name], rtol=rtol, atol=atol)
    }


def _convergence(kit: Kit, ours: Sequence[Mapping[str, Any]], expected: list[float]) -> str:
    """Return the message that names the ``convergence`` to declare for a loss curve, if any.

    Ranks that end with different weights are no approximation, unless that is declared too.
    """
    if kit.can.identical_weights:
        for record in ours[1:]:
            if differing(ours[0]["weights"], record["weights"], 0.0, 0.0):
                return (
                    f"\nRank {record['rank']} ends with other weights than rank 0, so this is no "
                    "approximation to declare. Fix: give all ranks the same gradients"
                )
    curve = ours[0]["curve"]
    least = max((curve[-1] - expected[-1]) / expected[0], 0.0)
    rounded = float(f"{max(1.1 * least, 1e-3):.1g}")
    bound = rounded if rounded >= least else 2 * rounded
    if bound <= MOST:
        return fits(f"convergence={bound:g}")
    return f"\nNo convergence is possible: it would be {bound:g}, and the largest is {MOST}"


def identical_on_ranks(report: Report, command: str = "fit", number: int = 0) -> None:
    """Check that weights and buffers are the same, bit for bit, on all ranks.

    Raises:
        AssertionError: they differ; the message has the tensor and the rank.
    """
    first, *others = report.ranks(command, number)
    for record in others:
        off = differing(first["weights"], record["weights"], 0.0, 0.0)
        assert not off, (
            f"weights on rank {record['rank']} differ from rank 0's, with the difference: {off}"
            f"{fits('identical_weights=False')}"
        )


def numbers(record: Mapping[str, Any], stage: str, epoch: int = 0) -> list[int]:
    """Return the samples that a rank saw in a stage, in order."""
    return [number for batch in record["seen"].get(f"{stage}-{epoch}", []) for number in batch]


def every_step(kit: Kit) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Yield each rank's record of ``nets.EveryStep``, and its weights before the last step."""
    for record in kit.report("every_step").ranks():
        yield record, record["notes"]["trained"]


def wrong_steps(kit: Kit, entries: torch.Tensor, steps: Sequence[int]) -> dict[int, str]:
    """Return the steps, from 1, that moved their entry wrongly, each with a text.

    In approximate strategies a step is wrong only if its entry has not moved, and steps of the
    first half may be a warm-up.
    """
    expected, off = (kit.ranks + 1) / 2, {}
    for step in steps:
        moved = -float(entries[step])
        if kit.can.convergence is None:
            wrong = not abs(moved - expected) < 1e-9
        else:
            wrong = step >= STEPS // 2 and not abs(moved) > MOVED
        if wrong:
            off[step + 1] = f"step {step + 1}: {moved:.4g}, expected {expected:.4g}"
    return off


def some(off: Mapping[int, str], most: int = 4) -> str:
    """Return the first texts of a table, for a message."""
    texts = list(off.values())
    return "; ".join(texts[:most]) + ("; …" if len(texts) > most else "")
