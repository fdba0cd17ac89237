"""Conformance cases about training: N ranks equal one process, and agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from geartrain_testing.checks import equals_one_process, identical_on_ranks
from geartrain_testing.kit import RANKS, Kit, fits, need
from geartrain_testing.program import COMPARED

_F = TypeVar("_F", bound=Callable[..., Any])
ONE_RANK = "one rank has nothing to compare with"
#: An entry of ``nets.OwnEntries`` above this was trained, not rounded; its own rank's ends near 1.
MOVED = 1e-3


def uses(*scenarios: str, start: str = RANKS) -> Callable[[_F], _F]:
    """Mark the shared scenarios of a test, and how their programs start."""

    def mark(function: _F) -> _F:
        function.scenarios, function.start = scenarios, start  # type: ignore[attr-defined]
        return function

    return mark


class TrainingCases:
    """Cases about weights, gradients and losses."""

    @pytest.mark.parametrize("scenario", COMPARED)
    def test_equals_one_process(self, kit: Kit, scenario: str) -> None:
        """Loss curve, epoch metric, counters and weights equal those of one process.

        The scenarios: SGD, Adam, several buckets, accumulation with a short last window, clipping,
        two optimizers, frozen parameters, parameters that only some steps and some ranks use, a
        scheduler, a loss from ``training_step_end``, two fits in a row, and losses with weights.
        """
        if scenario == "unused_parameters":
            need(kit.can.unused_parameters, "unused_parameters is declared unsupported")
            need(
                kit.can.sharded_loader or kit.ranks == 1,
                "ranks that see the same data use the same parameters",
            )
        if scenario == "weighted_loss":
            need(kit.can.weighted_loss, "weighted_loss is declared unsupported")
        equals_one_process(kit, scenario)
        if scenario == "fit_twice":
            equals_one_process(kit, scenario, number=1)
        ours, one = kit.report(scenario).ranks(), kit.reference(scenario).ranks()[0]
        for record in ours:
            assert record["notes"] == one["notes"], (
                f"rank {record['rank']} has the notes {record['notes']}, "
                f"and one process {one['notes']}"
            )

    @uses("sgd", "adam", "many_buckets", "accumulation")
    def test_identical_weights(self, kit: Kit) -> None:
        """Weights are the same, bit for bit, on all ranks after every scenario."""
        need(kit.ranks > 1, ONE_RANK)
        need(kit.can.identical_weights, "identical_weights is declared off")
        for report in kit.reports.by_name.values():
            # A scenario with an error fails another test.
            if report.error is None and report.name in COMPARED:
                identical_on_ranks(report)

    @uses("communication")
    def test_communication(self, kit: Kit) -> None:
        """Gradients of one rank reach the weights of every other rank, in every strategy."""
        need(kit.ranks > 1, ONE_RANK)
        for record in kit.report("communication").ranks():
            entries, rank = record["weights"]["entries"].tolist(), record["rank"]
            others = [
                other for other, entry in enumerate(entries) if other != rank and entry > MOVED
            ]
            assert others, (
                f"rank {rank} trains alone: no gradient of another rank reached its weights. "
                f"By rank: {entries}"
            )

    @uses("start_apart")
    def test_ranks_that_start_apart(self, kit: Kit) -> None:
        """Ranks that start with different weights end with equal ones."""
        need(kit.ranks > 1, ONE_RANK)
        need(kit.can.identical_weights, "identical_weights is declared off")
        identical_on_ranks(kit.report("start_apart"))

    @uses("buffers")
    def test_buffers(self, kit: Kit) -> None:
        """BatchNorm's statistics end equal on all ranks, although each rank has other batches."""
        need(kit.ranks > 1, ONE_RANK)
        report = kit.report("buffers")
        first, *others = report.ranks()
        assert first["weights"]["norm.num_batches_tracked"] == 7
        for record in others:
            for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
                ours, theirs = first["weights"][name], record["weights"][name]
                assert torch.equal(ours, theirs), (
                    f"{name} is {ours} on rank 0 and {theirs} on rank {record['rank']}"
                )

    @uses("no_sync")
    def test_no_sync(self, kit: Kit) -> None:
        """Gradients stay on their rank until a window's last micro-batch, or not, as declared."""
        need(kit.ranks > 1, ONE_RANK)
        need(kit.can.sharded_loader, "ranks that see the same data have the same gradients")
        first, *others = (record["notes"]["gradients"] for record in kit.report("no_sync").ranks())
        local = any(
            not torch.equal(ours, theirs)
            for other in others
            for ours, theirs in zip(first, other, strict=True)
        )
        if kit.can.no_sync:
            assert local, (
                "gradients are the same on all ranks after the first micro-batch of two: "
                "every micro-batch is reduced" + fits("no_sync=False")
            )
        else:
            assert not local, (
                "no_sync is declared unsupported and works: "
                "gradients are local after the first micro-batch of two"
            )

    def test_unused_parameters_unsupported(self, kit: Kit) -> None:
        """If they are declared unsupported, a step with other parameters than before is an error.

        The run must neither hang nor continue silently.
        """
        need(
            not kit.can.unused_parameters,
            "unused_parameters is supported; test_equals_one_process tests it",
        )
        with kit.program("alternating_parameters", "alternating-parameters", {}) as run:
            code = run.finish()
            assert list(run.folder.glob("started-*")), f"failed before it trained\n{run.shown()}"
            assert code != 0, (
                f"unused_parameters is declared unsupported and no error came\n{run.shown()}"
            )

    def test_weighted_loss_unsupported(self, kit: Kit) -> None:
        """If it is declared unsupported, a loss with a weight is an error."""
        need(
            not kit.can.weighted_loss,
            "weighted_loss is supported; test_equals_one_process tests it",
        )
        need(kit.ranks > 1, ONE_RANK)
        with kit.program("weighted_loss", "weighted-loss-unsupported", {}) as run:
            code = run.finish()
            assert code != 0, f"weighted_loss is declared unsupported and works\n{run.shown()}"
