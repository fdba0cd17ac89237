"""A run that goes on from a checkpoint is bit for bit what it would have been, on two ranks, under each algorithm; what is saved is one
model."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_bagua import BaguaStrategy

from .cases import Net, one_trainer, samples

CASES = (
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "power_sgd",
    "decentralized",
    "shift_one",
    "decentralized, 16-mixed",
    "low precision",
    "low precision, hierarchical",
)
OWN_WEIGHTS = CASES[4:]


PROGRAMS = ("resume",)


@pytest.fixture
def ranks(kept):
    """What each of two ranks kept of all runs."""
    return kept("resume")


def same(mine, theirs):
    """Whether two states are equal, tensors bit by bit."""
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs) or (
        isinstance(mine, float) and math.isnan(mine) and math.isnan(theirs)
    )


@pytest.mark.parametrize("step", [2, 8])
@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_what_it_would_have_been(ranks, case, step):
    for rank in ranks:
        whole, rest = rank[case], rank[f"{case} from {step}"]
        assert rest["told"] == []  # nothing begun anew
        assert [part for part in whole if not same(whole[part], rest[part])] == []


@pytest.mark.parametrize("case", OWN_WEIGHTS)
def test_each_rank_went_on_with_its_own(ranks, case):
    """What the test above compares does differ from rank to rank."""
    first, second = (rank[case] for rank in ranks)
    assert not same(first["ema"]["average"], second["ema"]["average"])
    assert case.startswith("low") or not same(first["state"]["weights"], second["state"]["weights"])
    if case.endswith("16-mixed"):
        assert first["scaler"] != second["scaler"]


@pytest.mark.parametrize("name", ["async", "async with ema"])
def test_a_checkpoint_of_async_holds_one_model(ranks, name):
    first, second = (rank[name] for rank in ranks)
    assert len(first["files"]) == 3
    # The module's on_save_checkpoint saw what is saved, on both ranks, and nobody changed it until it was.
    assert same(first["copies"], second["copies"])
    assert same(first["saved"], second["saved"])
    for saved, (trained, copied) in zip(first["saved"], first["files"], strict=True):
        assert torch.equal(saved, trained)
        assert torch.equal(saved, copied)


def test_async_goes_on_with_each_ranks_momenta(ranks):
    for rank in ranks:
        (_, ended), (begun, _) = rank["async"]["momenta"], rank["async resumed"]["momenta"]
        assert len(ended) == 8
        assert same(begun, ended)
    assert not same(ranks[0]["async"]["momenta"][1], ranks[1]["async"]["momenta"][1])


def test_under_async_the_average_of_an_ema_is_validated_and_nobody_averages_it(ranks):
    first, second = (rank["async with ema"] for rank in ranks)
    for rank in (first, second):
        assert rank["validated"]
        assert all(rank["validated"])
        assert torch.equal(rank["end"], rank["ema"])
    assert same(
        first["after"], second["after"]
    )  # after a validation all ranks have one model to train, still


# --- what does not fit ---------------------------------------------------------------------------------------------------


def refused(tmp_path, then, now):
    """Train by some options and go on by others; the error."""

    def fit(options, epochs, path=None):
        trainer = one_trainer(
            devices=1, strategy=BaguaStrategy(**options), output=tmp_path / "run", max_epochs=epochs
        )
        trainer.fit(Net(), DataLoader(samples(), batch_size=8), ckpt_path=path)

    fit(then, 1)
    with pytest.raises(gt.UsageError) as caught:
        fit(now, 2, "last")
    return str(caught.value)


def test_weights_in_other_buckets_are_refused(tmp_path):
    one = {"algorithm": "decentralized", "hierarchical": False}
    told = refused(tmp_path, one, {**one, "bucket_bytes": 100})
    assert "the checkpoint has each rank's weights in 1 buckets of" in told
    assert "Fix: the same bucket_bytes and frozen parameters as in the run that saved it" in told
