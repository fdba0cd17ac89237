"""Messages of the conformance kit: a slow or hung scenario, and the capability to declare."""

import os
import time

import pytest
import torch

from geartrain_testing.checks import equals_one_process, identical_on_ranks
from geartrain_testing.kit import Report, _slow_or_hung
from geartrain_testing.recorder import save

EXPECTED = [2.0, 1.5, 1.0]


@pytest.fixture
def marks(tmp_path):
    """``marks(0.1, 50)``: a scenario's folder; rank 0's last step is 0.1 s old, rank 1's 50 s."""

    def make(*ages):
        for rank, age in enumerate(ages):
            path = tmp_path / f"progress-{rank}"
            path.touch()
            os.utime(path, times=(time.time() - age,) * 2)
        return tmp_path

    return make


def test_ranks_that_still_make_steps_are_slow(marks):
    said = _slow_or_hung(marks(0.1, 50), 60)
    assert said.startswith("slow, not hung (last steps: rank 0 0.")
    assert "rank 1 50." in said
    assert "--deadline 120" in said


@pytest.mark.parametrize("ages", [(), (40, 50)])
def test_ranks_that_make_no_step_are_hung(marks, ages):
    said = _slow_or_hung(marks(*ages), 60)
    assert said.startswith("hung (last steps: rank 0 40." if ages else "hung (last steps: none)")


def record(rank=0, curve=EXPECTED, weight=1.0, step=3, mean=1.5):
    weights = {"last.weight": torch.tensor([weight]), "last.bias": torch.zeros(1)}
    return {
        "rank": rank,
        "step": step,
        "epoch": 1,
        "curve": list(curve),
        "weights": weights,
        "metrics": {"loss_epoch": mean},
    }


class Recorded:
    """A kit whose programs have run, with the given records of its ranks and of one process."""

    def __init__(self, folder, ranks, **capabilities):
        from geartrain_testing.capabilities import Capabilities

        self.can = Capabilities(**capabilities)
        for where, records in (("ours", ranks), ("one", [record()])):
            (folder / where).mkdir()
            for each in records:
                save(each, folder / where / f"fit-0-rank-{each['rank']}.pt")
        self.folder = folder

    def report(self, scenario):
        return Report(scenario, self.folder / "ours")

    def reference(self, scenario):
        return Report(scenario, self.folder / "one")


def refused(folder, *ranks, **capabilities):
    with pytest.raises(AssertionError) as caught:
        equals_one_process(Recorded(folder, ranks, **capabilities), "sgd")
    return str(caught.value)


def test_a_loss_that_is_near_names_the_parameters_and_the_capability(tmp_path):
    said = refused(tmp_path, record(curve=[2.0, 1.6, 1.1], weight=1.25), record(1, weight=1.25))
    assert "the loss differs from one process's from step 1: 1.6, expected 1.5" in said
    assert "weights on rank 0 that differ, with the difference: {'last.weight': 0.25}" in said
    assert said.endswith(
        "If this is the strategy's design, declare the capability convergence=0.06"
    )


@pytest.mark.parametrize("identical_weights", [True, False])
def test_convergence_is_suggested_only_if_ranks_end_as_declared(tmp_path, identical_weights):
    ranks = record(curve=[2.0, 1.6, 1.1], weight=1.25), record(1)
    said = refused(tmp_path, *ranks, identical_weights=identical_weights)
    assert ("Rank 1 ends with other weights than rank 0" in said) == identical_weights
    assert ("convergence=0.06" in said) != identical_weights


def test_a_loss_that_is_far_has_no_capability(tmp_path):
    said = refused(tmp_path, record(curve=[2.0, 2.5, 3.0]))
    assert "No convergence is possible: it would be 1, and the largest is 0.5" in said


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [record(), record(1, step=2)],
            "rank 1 counts (2, 1) steps and epochs, and one process (3, 1)",
        ),
        (
            [record(), record(1, mean=1.6)],
            "loss_epoch is not the same on all ranks; by rank: [1.5, 1.6]",
        ),
        (
            [record(mean=3.0), record(1, mean=3.0)],
            "loss_epoch is 3.0; with convergence=0.5 it may be 2.5",
        ),
        (
            [record(curve=[2.0, 2.0, 2.5])],
            "with convergence=0.5 it may end at 2.0 No convergence is possible",
        ),
    ],
)
def test_an_approximate_strategy_outside_its_bound_fails(tmp_path, ranks, words):
    said = refused(tmp_path, *ranks, convergence=0.5, identical_weights=False)
    # pytest indents the messages of assertions that it has rewritten.
    assert words in " ".join(said.split())


def test_an_approximate_strategy_within_its_bound_passes(tmp_path):
    equals_one_process(
        Recorded(tmp_path, [record(curve=[2.0, 1.6, 1.4], weight=9.0)], convergence=0.2), "sgd"
    )


def test_weights_that_differ_between_ranks_are_named_with_the_capability(tmp_path):
    kit = Recorded(tmp_path, [record(), record(1, weight=1.5)])
    with pytest.raises(
        AssertionError,
        match=r"weights on rank 1 differ.*\{'last.weight': 0.5\}\n.* identical_weights=False",
    ):
        identical_on_ranks(kit.report("sgd"))


@pytest.mark.parametrize("capability", ["", "uneven_inputs"])
def test_a_scenario_that_did_not_end_names_the_capability(tmp_path, capability):
    with pytest.raises(AssertionError) as caught:
        Report("uneven_inputs", tmp_path, "hung").check(capability)
    assert ("the capability uneven_inputs=False" in str(caught.value)) == bool(capability)
