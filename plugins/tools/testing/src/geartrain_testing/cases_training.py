"""Conformance cases about training: N ranks equal one process, and agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from geartrain_testing.checks import (
    MOVED,
    differing,
    equals_one_process,
    every_step,
    identical_on_ranks,
    some,
    wrong_steps,
)
from geartrain_testing.kit import RANKS, Kit, fits, need
from geartrain_testing.nets import DIGIT, STEPS, batch_size, is_unequal
from geartrain_testing.program import COMPARED

_F = TypeVar("_F", bound=Callable[..., Any])
ONE_RANK = "one rank has nothing to compare with"


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
        if scenario == "sgd" and not kit.can.float64:
            weights = (of(scenario).ranks()[0]["weights"] for of in (kit.report, kit.reference))
            assert differing(*weights), "float64 is declared unsupported and works"
        if scenario == "fit_twice":
            equals_one_process(kit, scenario, number=1)
        found, expected = kit.report(scenario).ranks(), kit.reference(scenario).ranks()[0]
        for record in found:
            assert record["notes"] == expected["notes"], (
                f"rank {record['rank']} has the notes {record['notes']}, "
                f"and one process {expected['notes']}"
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

    @uses("start_apart")
    def test_start(self, kit: Kit) -> None:
        """Every rank starts with the weights and the buffers of rank 0, bit for bit."""
        records = kit.report("start_apart").ranks()
        made = records[0]["notes"]["made"]
        for record in records:
            off = differing(record["notes"]["start"], made, 0.0, 0.0)
            same = [
                other["rank"]
                for other in records[1:]
                if not differing(record["notes"]["start"], other["notes"]["made"], 0.0, 0.0)
            ]
            has = f", and has those of rank {same[0]}" if same else ""
            assert not off, (
                f"rank {record['rank']} starts without the weights and buffers of rank 0{has}; "
                f"largest differences: {off}. Fix: wrap_model copies the parameters and buffers of "
                "rank 0 to every rank, in their own types"
            )

    # --- a hundred steps --------------------------------------------------------------------------

    @uses("every_step")
    def test_every_step(self, kit: Kit) -> None:
        """Each of 100 steps trains with the mean of all ranks' gradients."""
        steps = [step for step in range(STEPS) if not is_unequal(step)]
        for record, trained in every_step(kit):
            off = wrong_steps(kit, trained["steps"], steps)
            assert not off, (
                f"rank {record['rank']} trained by other amounts than the mean gradient in "
                f"{len(off)} of {len(steps)} steps: {some(off)}. Fix: each step must apply its own "
                "mean over all ranks: not none, not a part of it, and not that of an earlier step"
            )

    @uses("every_step")
    def test_unequal_batches(self, kit: Kit) -> None:
        """Ranks with batches of 1 to 4 samples count equally: the gradient is the ranks' mean."""
        steps = [step for step in range(STEPS) if is_unequal(step)]
        for record, trained in every_step(kit):
            off = wrong_steps(kit, trained["steps"], steps)
            sizes = {
                step + 1: [batch_size(rank, step) for rank in range(kit.ranks)] for step in steps
            }
            assert not off, (
                f"rank {record['rank']} trained by other amounts than the mean gradient in "
                f"{len(off)} of {len(steps)} steps with unequal or short batches: {some(off)}. "
                f"Batch sizes by rank: { {step: sizes[step] for step in list(off)[:4]} }. "
                "Fix: do not weigh, drop or replace gradients by the size of a batch"
            )

    @uses("every_step")
    def test_dtypes(self, kit: Kit) -> None:
        """Parameters of bfloat16, float32 and float64 in one model train by the same amounts."""
        for record, trained in every_step(kit):
            expected = trained["f64"] / (1 + DIGIT["f64"])
            for name, tolerance in (("bf16", 1e-2), ("f32", 1e-5), ("f64", 1e-12)):
                found = trained[name].double() / (1 + DIGIT[name])
                if kit.can.convergence is None:
                    good = torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
                else:
                    good = bool((found.abs() > MOVED).all())
                assert good, (
                    f"rank {record['rank']} trained {name!r} by "
                    f"{found.tolist()}, and 'f64' by {expected.tolist()}. "
                    "Fix: reduce the gradients of each type, each in its own type"
                )

    @uses("unfreezing")
    def test_unfreezing(self, kit: Kit) -> None:
        """A parameter that is unfrozen in the middle trains on all ranks, or is an error.

        The error names the parameter. A run that continues would let the ranks' weights differ.
        """
        report = kit.reports.by_name["unfreezing"]
        refused = report.error is not None and "unfrozen_late" in report.error
        for record in [] if refused else report.check().ranks():
            moved = (-record["weights"]["unfrozen_late"]).tolist()
            if kit.can.convergence is None:
                good = all(abs(each - 0.3) < 1e-6 for each in moved)
            else:
                good = all(abs(each) > MOVED for each in moved)
            assert good, (
                f"rank {record['rank']} trained a parameter that was unfrozen after 3 of 6 steps "
                f"by {moved}, expected 0.3 in each rank's entry: its gradients were not averaged. "
                "Fix: look at requires_grad in each step; or raise an error with the name of the "
                "parameter"
            )

    @uses("adam", "resume")
    def test_resume(self, kit: Kit) -> None:
        """A fit that stops after an epoch and resumes from its checkpoint equals a whole fit.

        Strategies whose ranks have different weights are only compared by their loss.
        """
        report, whole = kit.report("resume"), kit.report("adam").ranks()
        assert (report.folder / "output" / "last.ckpt").exists(), (
            "fit saved no checkpoint: output/last.ckpt does not exist. "
            "Fix: save_checkpoint writes to its path on one rank or on all, or leave the hook out"
        )
        resumed = report.ranks(number=1)
        if not kit.can.identical_weights:
            most = whole[0]["curve"][-1] + (kit.can.convergence or 0) * whole[0]["curve"][0]
            found = resumed[0]["curve"][-1]
            assert found <= most, (
                f"a resumed fit ends with the loss {found}; after a whole fit's "
                f"{whole[0]['curve'][-1]} it may be {most}"
            )
            return
        for mine, record in zip(whole, resumed, strict=True):
            off = differing(record["weights"], mine["weights"])
            assert not off, (
                f"rank {record['rank']} of a resumed fit ends with other weights than in a whole "
                f"fit; largest differences: {off}. Fix: load_checkpoint returns the whole state on "
                "every rank; and a strategy with a state of its own, such as errors of compressed "
                "gradients, has state_dict() and load_state_dict(state)"
            )

    @uses("buffers")
    def test_buffers(self, kit: Kit) -> None:
        """BatchNorm's statistics end equal on all ranks, although each rank has other batches."""
        need(kit.ranks > 1, ONE_RANK)
        report = kit.report("buffers")
        first, *others = report.ranks()
        assert first["weights"]["norm.num_batches_tracked"] == 7
        for record in others:
            for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
                before, after = first["weights"][name], record["weights"][name]
                assert torch.equal(before, after), (
                    f"{name} is {before} on rank 0 and {after} on rank {record['rank']}"
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
