"""A resumed Horovod run equals an uninterrupted one, and its rates follow the number of workers."""

from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the results by case, of each of two ranks and of a run of one rank that resumed."""
    folder = tmp_path_factory.mktemp("resume")
    for ranks in (2, 1):
        with launched(
            str(HERE / "resuming.py"), str(folder), str(ranks), folder=folder, name=f"run-{ranks}"
        ) as run:
            run.succeed(300)
    return [
        torch.load(folder / f"kept-{name}.pt", weights_only=False) for name in ("2-0", "2-1", "1-0")
    ]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


PAIRS = [
    ("plain", "rest"),
    ("plain", "within"),
    ("not scaled", "within"),
    ("16-mixed", "within"),
    ("two optimizers", "within"),
    ("in groups, in float16", "within"),
    ("horovod's optimizer", "within"),
]


@pytest.mark.parametrize(("case", "rest"), PAIRS)
def test_a_resumed_run_equals_an_uninterrupted_run(kept, case, rest):
    for rank in kept[:2]:
        a, b = rank[case]["whole"], rank[case][rest]
        assert equal(a["weights"], b["weights"])
        for mine, theirs in zip(a["optimizers"], b["optimizers"], strict=True):
            assert mine["param_groups"] == theirs["param_groups"]
            assert all(
                equal(state, theirs["state"][index]) for index, state in mine["state"].items()
            )
        assert (a["schedulers"], a["metrics"], a["step"]) == (
            b["schedulers"],
            b["metrics"],
            b["step"],
        )
        assert a["rates"][-len(b["rates"]) :] == b["rates"]
        assert b["warnings"] == []
    assert equal(kept[0][case][rest]["weights"], kept[1][case][rest]["weights"])


def test_rates_follow_the_number_of_workers(kept):
    """Two ranks saved after the first epoch's last step; one rank resumes with half their rates."""
    two, one = kept[0]["plain"]["whole"], kept[2]["two became one"]
    warning = "learning rates of the checkpoint were × 2 and are now × 1, as in the plan"
    assert warning in one["warnings"]
    assert len(one["rates"]) == 11
    assert [rate for (rate,) in one["rates"][:6]] == pytest.approx(
        [rate / 2 for (rate,) in two["rates"][6:]]
    )
    assert one["optimizers"][0]["param_groups"][0]["initial_lr"] == pytest.approx(0.02)


def test_rates_of_another_strategys_checkpoint_are_scaled(kept):
    warning = "learning rates of the checkpoint were × 1 and are now × 2, as in the plan"
    for rank, expected in zip(kept[:2], ([warning], []), strict=True):
        warnings = rank["was ddp's"]["warnings"]
        assert [one for one in warnings if "learning rates" in one] == expected
        assert rank["was ddp's"]["rates"] == [
            pytest.approx(rates) for rates in rank["plain"]["whole"]["rates"][6:]
        ]


def test_a_process_set_of_all_ranks_equals_no_process_set(kept):
    """Horovod refuses to create a set of all ranks."""
    for rank in kept[:2]:
        assert equal(rank["process set"]["weights"], rank["plain"]["whole"]["weights"])
        assert rank["process set"]["warnings"] == []
