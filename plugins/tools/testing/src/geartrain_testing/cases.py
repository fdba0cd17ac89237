"""Conformance cases about data, metrics, collectives and the caller's view."""

from __future__ import annotations

import math
from collections import Counter

import torch

from geartrain_testing.cases_training import ONE_RANK, uses
from geartrain_testing.checks import numbers
from geartrain_testing.kit import Kit, Report, fits, need
from geartrain_testing.nets import LARGE
from geartrain_testing.scenarios import EVALUATED, EVALUATION_BATCH

#: Relative tolerance of metrics that are whole numbers or their means, in float64.
_EXACT = 1e-12
#: The mean of the evaluation samples' squared numbers.
MEAN = sum(number * number for number in range(EVALUATED)) / EVALUATED


def _once(kit: Kit, report: Report, command: str, total: int) -> None:
    """Check that the ranks together saw each sample once; without sharding, that each rank did."""
    records = report.ranks(command)
    assert len(records) == kit.ranks, (
        f"{len(records)} ranks recorded {command}, expected {kit.ranks}"
    )
    seen = [numbers(record, command) for record in records]
    if not kit.can.sharded_loader:
        for rank, mine in enumerate(seen):
            assert sorted(mine) == list(range(total)), (
                f"sharded_loader is declared off, and rank {rank} did not see all samples once"
            )
        return
    counts = Counter(number for mine in seen for number in mine)
    lost = sorted(set(range(total)) - set(counts))
    twice = sorted(number for number, times in counts.items() if times > 1)
    assert not lost, f"{command}: no rank saw the samples {lost}"
    assert not twice, f"{command}: the samples {twice} were seen more than once"


class Cases:
    """Cases about samples, metrics, collectives and returned values."""

    # --- data -------------------------------------------------------------------------------------

    @uses("training_coverage")
    def test_training_coverage(self, kit: Kit) -> None:
        """Each epoch sees every sample, at most world size - 1 of them twice.

        Each rank gets equally many samples. With shuffle=True each epoch has a new order.
        """
        total = 5 * kit.request.global_batch + 1
        records = kit.report("training_coverage").ranks()
        for epoch in range(2):
            seen = [numbers(record, "train", epoch) for record in records]
            assert len({len(mine) for mine in seen}) == 1, (
                f"ranks saw unequal numbers of samples: {[len(mine) for mine in seen]}"
            )
            if kit.can.sharded_loader:
                counts = Counter(number for mine in seen for number in mine)
                assert set(counts) == set(range(total)), (
                    f"epoch {epoch}: no rank saw {sorted(set(range(total)) - set(counts))}"
                )
                extra = sum(counts.values()) - total
                assert extra < kit.ranks, (
                    f"epoch {epoch}: {extra} samples too many; padding is at most world size - 1"
                )
            else:
                assert all(sorted(mine) == list(range(total)) for mine in seen), (
                    "sharded_loader is declared off, and not every rank saw all samples once"
                )
        for record in records:
            assert numbers(record, "train", 0) != numbers(record, "train", 1), (
                f"rank {record['rank']} had the same order in both epochs"
            )

    @uses("training_coverage")
    def test_sharded_loader(self, kit: Kit) -> None:
        """Each rank sees a part of the data, or all of it, as declared."""
        need(kit.ranks > 1, ONE_RANK)
        first, second, *_ = (
            set(numbers(record, "train")) for record in kit.report("training_coverage").ranks()
        )
        if kit.can.sharded_loader:
            # One sample may be padding.
            both = f"ranks 0 and 1 both saw the samples {sorted(first & second)}"
            assert len(first & second) < kit.ranks, both + (
                fits("sharded_loader=False") if first == second else ""
            )
        else:
            assert first == second, (
                "sharded_loader is declared unsupported and works: "
                "ranks 0 and 1 saw different samples"
            )

    @uses("evaluation_coverage")
    def test_evaluation_coverage(self, kit: Kit) -> None:
        """Validation, test and prediction use every sample exactly once over all ranks.

        This includes the last, smaller batch. Metrics equal those of one process. ``predict``
        returns the outputs of all batches, in the loader's order.
        """
        report = kit.report("evaluation_coverage")
        for command in ("validate", "test", "predict"):
            _once(kit, report, command, EVALUATED)
        for seen in report.caller[:2]:
            found = seen["metrics"]["mean"]
            assert abs(found - MEAN) < _EXACT * MEAN, (
                f"the mean over all samples is {found}, expected {MEAN}"
            )
        outputs = [batch["number"].tolist() for batch in report.caller[2]["result"]]
        once = [
            list(range(i, min(i + EVALUATION_BATCH, EVALUATED)))
            for i in range(0, EVALUATED, EVALUATION_BATCH)
        ]
        expected = once if kit.can.sharded_loader else once * kit.ranks
        assert outputs == expected, (
            f"predict returned outputs of the samples {outputs}, by batch; expected {expected}"
        )

    @uses("rank_without_samples")
    def test_rank_without_samples(self, kit: Kit) -> None:
        """With one sample in all, ranks without a sample do not change the metrics."""
        report = kit.report("rank_without_samples")
        _once(kit, report, "validate", 1)
        (found,) = report.caller[0]["result"]
        expected = {"mean": 0.0, "min": 0.0, "max": 0.0, "one": 1.0}
        assert {name: found[name] for name in expected} == expected

    @uses("uneven_inputs", "uneven_training")
    def test_uneven_inputs(self, kit: Kit) -> None:
        """Ranks with unequal numbers of batches end.

        Validation has a collective in each ``validation_step``. Training has loaders without a
        length, and ends with the rank that has the fewest batches.
        """
        if not kit.can.uneven_inputs:
            errors = [
                kit.reports.by_name[name].error for name in ("uneven_inputs", "uneven_training")
            ]
            assert any(errors), "uneven_inputs is declared unsupported and works"
            return
        _once(kit, kit.report("uneven_inputs"), "validate", kit.ranks * EVALUATION_BATCH + 1)
        steps = [record["step"] for record in kit.report("uneven_training").ranks()]
        assert steps == [3] * kit.ranks, f"the ranks made {steps} steps, and one had 3 batches"

    # --- metrics ----------------------------------------------------------------------------------

    @uses("metrics")
    def test_metrics(self, kit: Kit) -> None:
        """Every rank has the mean, sum, min and max over all ranks with ``sync_dist=True``."""
        copies = 1 if kit.can.sharded_loader else kit.ranks
        expected = {
            "mean": MEAN,
            "sum": copies * EVALUATED * (EVALUATED - 1) / 2,
            "min": 0.0,
            "max": EVALUATED - 1.0,
        }
        for record in kit.report("metrics").ranks("validate"):
            for name, value in expected.items():
                found = record["metrics"].get(name)
                assert found is not None, f"rank {record['rank']} has no metric {name!r}"
                assert abs(found - value) < _EXACT * value + _EXACT, (
                    f"{name} is {found} on rank {record['rank']}, expected {value}"
                )

    @uses("metrics")
    def test_weighted_means(self, kit: Kit) -> None:
        """Means are weighted by batch size, also if the ranks' last batches are unequal."""
        expected = sum(rank * (rank + 1) for rank in range(kit.ranks)) / sum(
            rank + 1 for rank in range(kit.ranks)
        )
        for record in kit.report("metrics").ranks("validate"):
            assert record["metrics"]["one"] == 1.0, (
                f"the mean of ones is {record['metrics']['one']} on rank {record['rank']}"
            )
            assert abs(record["metrics"]["weighted"] - expected) < _EXACT

    @uses("metrics", "collectives")
    def test_large_numbers(self, kit: Kit) -> None:
        """Metrics keep whole numbers above 2**24, and ``all_gather`` int64 above 2**53."""
        for record in kit.report("metrics").ranks("validate"):
            found, expected = record["metrics"]["large"], 2**24 + EVALUATED - 1
            assert found == expected, (
                f"a metric is {found:.0f} on rank {record['rank']}, expected {expected}. "
                "Fix: log_sync sends float64"
            )
        expected_rows = torch.stack(
            [torch.arange(3) + LARGE + 10 * rank for rank in range(kit.ranks)]
        )
        for record in kit.report("collectives").ranks("validate"):
            found = record["notes"]["gathered"]["large"]
            assert torch.equal(found, expected_rows), (
                f"all_gather of int64 on rank {record['rank']}: {found.tolist()}, expected "
                f"{expected_rows.tolist()}. Fix: all_gather sends each tensor in its own type"
            )

    @uses("every_step", "metrics", "collectives")
    def test_nan(self, kit: Kit) -> None:
        """NaN on one rank is NaN on all: in gradients, in a mean of metrics, and gathered.

        Otherwise a run that is broken would look healthy.
        """
        for record in kit.report("metrics").ranks("validate"):
            found = record["metrics"]["nan"]
            assert math.isnan(found), (
                f"a metric that is NaN on one rank is {found} on rank {record['rank']}. "
                "Fix: log_sync must not change values"
            )
        for record in kit.report("collectives").ranks("validate"):
            found = record["notes"]["gathered"]["nan"]
            assert found.isnan().any(-1).all(), (
                f"all_gather of NaN on rank {record['rank']}: {found.tolist()}. "
                "Fix: all_gather must not change values"
            )
        if kit.can.convergence is None:
            for record in kit.report("every_step").ranks():
                found = record["weights"]["broken"]
                assert found.isnan().all(), (
                    f"the gradient of the last rank was NaN in the last step, and the weight on "
                    f"rank {record['rank']} is {found.tolist()}. Fix: reduce_gradients must not "
                    "replace NaN, nor leave out a rank"
                )

    def test_key_on_one_rank(self, kit: Kit) -> None:
        """A ``sync_dist`` metric on one rank only is an error that names the key and the rank."""
        need(kit.ranks > 1, ONE_RANK)
        with kit.program("key_on_one_rank", "key-on-one-rank", {}) as run:
            code = run.finish()
            assert code != 0, (
                f"only the last rank logged 'of_one_rank_only', and no error came\n{run.shown()}"
            )
            for part in ("of_one_rank_only", str(kit.ranks - 1)):
                assert part in run.program.err, f"the error does not say {part!r}\n{run.shown()}"

    # --- collectives ------------------------------------------------------------------------------

    @uses("collectives")
    def test_all_gather(self, kit: Kit) -> None:
        """Equal tensors are stacked in the order of ranks; others keep their form."""
        size = kit.ranks
        rows = [torch.arange(3) + 10 * rank for rank in range(size)]
        for record in kit.report("collectives").ranks("validate"):
            found = record["notes"]["gathered"]
            owner = f"all_gather on rank {record['rank']}: "
            assert torch.equal(found["equal"], torch.stack(rows)), (
                f"{owner}{found['equal'].tolist()}"
            )
            assert torch.equal(found["scalar"], torch.stack(rows)[:, 0]), (
                f"{owner}of scalars: {found['scalar'].tolist()}"
            )
            unequal = [part.tolist() for part in found["unequal"]]
            assert unequal == [[[rank, rank]] * (rank + 1) for rank in range(size)], (
                f"{owner}of unequal lengths: {unequal}"
            )
            inner = found["nested"]["a"]
            assert torch.equal(inner[0], torch.stack(rows)), f"{owner}nested: {inner[0].tolist()}"
            assert isinstance(inner[1], tuple)
            assert torch.equal(inner[1][0], torch.stack(rows).double()), (
                f"{owner}nested: {inner[1][0].tolist()}"
            )

    @uses("collectives")
    def test_broadcast(self, kit: Kit) -> None:
        """Each rank in turn sends an object to all ranks."""
        expected = [{"from": src, "text": "é" * (src + 1)} for src in range(kit.ranks)]
        for record in kit.report("collectives").ranks("validate"):
            found = record["notes"]["broadcast"]
            assert found == expected, (
                f"rank {record['rank']} received {found} from ranks 0 to {kit.ranks - 1}"
            )

    @uses("barrier")
    def test_barrier(self, kit: Kit) -> None:
        """No rank passes a barrier before the last rank has arrived."""
        for record in kit.report("barrier").ranks("validate"):
            early = [late for late, waited in enumerate(record["notes"]["waited"]) if not waited]
            assert not early, (
                f"rank {record['rank']} passed the barrier before rank {early} arrived"
            )

    # --- the caller's view ------------------------------------------------------------------------

    @uses("fit_validate_test")
    def test_fit_validate_test(self, kit: Kit) -> None:
        """After ``fit``, validation and test in the same program use the trained weights."""
        need(
            kit.ranks == 1 or kit.can.identical_weights,
            "validation in fit uses each rank's weights, and later validation uses rank 0's",
        )
        fitted, validated, tested = kit.report("fit_validate_test").caller
        expected = fitted["metrics"]["val_loss"]
        for message, found in (
            ("validate", validated["result"][0]["val_loss"]),
            ("test", tested["result"][0]["test_loss"]),
        ):
            assert abs(found - expected) < _EXACT, (
                f"{message} gives the loss {found}; validation at the end of fit gave {expected}"
            )

    @uses("fit_validate_test")
    def test_caller(self, kit: Kit) -> None:
        """After ``fit`` the caller has rank 0's weights, metrics and counters."""
        report = kit.report("fit_validate_test")
        first, seen = report.ranks()[0], report.caller[0]
        assert (seen["step"], seen["epoch"]) == (first["step"], first["epoch"]), (
            "global_step and current_epoch are not rank 0's"
        )
        assert seen["metrics"] == first["metrics"], (
            f"callback_metrics are {seen['metrics']}, and rank 0's are {first['metrics']}"
        )
        for name, tensor in first["weights"].items():
            assert torch.equal(tensor, seen["weights"][name]), (
                f"{name} of the caller's model differs from the one that rank 0 trained"
            )

    @uses("plugins")
    def test_plugins(self, kit: Kit) -> None:
        """Every rank has the program's plugins and their options: from a file, and an object."""
        for record in kit.report("plugins").ranks("validate"):
            found = {name: record["notes"].get(name) for name in ("file plugin", "object plugin")}
            assert found == {"file plugin": "as chosen", "object plugin": [1, 2]}, (
                f"rank {record['rank']} has {found}"
            )
