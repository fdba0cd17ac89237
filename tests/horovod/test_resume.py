"""Going on under Horovod: bit for bit what it would have been, and learning rates are those of this run's number of workers."""

from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """case -> what it came to, for each of two ranks, and of one that went on alone."""
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
    ("accumulated and clipped", "within"),
    ("16-mixed", "within"),
    ("bf16-mixed", "within"),
    ("two optimizers", "within"),
    ("manual", "within"),
    ("averaged", "within"),
    ("in groups, in float16", "within"),
    ("horovod's own", "within"),
]


@pytest.mark.parametrize(("case", "rest"), PAIRS)
def test_the_rest_is_what_it_would_have_been(kept, case, rest):
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
        assert b["told"] == []
    assert equal(kept[0][case][rest]["weights"], kept[1][case][rest]["weights"])


def test_rates_follow_the_number_of_workers(kept):
    """Two ranks have saved at the end of the first epoch's last step, and one goes on with half their rates, along the same schedule."""
    two, one = kept[0]["plain"]["whole"], kept[2]["two became one"]
    assert (
        "learning rates of the checkpoint were × 2, and are × 1 now, as the plan says"
        in one["told"]
    )
    assert len(one["rates"]) == 11
    assert [rate for (rate,) in one["rates"][:6]] == pytest.approx(
        [rate / 2 for (rate,) in two["rates"][6:]]
    )
    assert one["optimizers"][0]["param_groups"][0]["initial_lr"] == pytest.approx(0.02)


def test_rates_of_another_strategys_checkpoint_are_scaled_as_the_plan_says(kept):
    for rank, told in zip(
        kept[:2],
        (["learning rates of the checkpoint were × 1, and are × 2 now, as the plan says"], []),
        strict=True,
    ):
        assert [one for one in rank["was ddp's"]["told"] if "learning rates" in one] == told
        assert rank["was ddp's"]["rates"] == [
            pytest.approx(rates) for rates in rank["plain"]["whole"]["rates"][6:]
        ]


def test_a_process_set_of_all_ranks_is_none(kept):
    """Horovod refuses to make one."""
    for rank in kept[:2]:
        assert equal(rank["process set"]["weights"], rank["plain"]["whole"]["weights"])
        assert rank["process set"]["told"] == []
