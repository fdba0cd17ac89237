"""Resumed runs equal uninterrupted ones bit by bit, on two ranks, with each algorithm."""

import math

import pytest
import torch
from several_ranks import kept_by
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_bagua import BaguaStrategy

from .cases import Net, one_trainer, samples
from .resume_cases import CASES, fit_and_resume

OWN_WEIGHTS = ("shift_one", "decentralized, 16-mixed", "low precision")

ranks = kept_by(fit_and_resume, seconds=240)


def same(mine, theirs):
    """True if two states are equal, tensors bit by bit."""
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    both_nan = isinstance(mine, float) and math.isnan(mine) and math.isnan(theirs)
    return both_nan or bool(mine == theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(ranks, case):
    for rank in ranks:
        whole, rest = rank[case], rank[f"{case} resumed"]
        assert rest["warnings"] == []  # no part starts from scratch
        assert [part for part in whole if not same(whole[part], rest[part])] == []


@pytest.mark.parametrize("case", OWN_WEIGHTS)
def test_each_rank_resumes_with_its_own_state(ranks, case):
    """The states that the test above compares differ between ranks."""
    first, second = (rank[case] for rank in ranks)
    assert not same(first["ema"]["average"], second["ema"]["average"])
    assert case.startswith("low") or not same(first["state"]["weights"], second["state"]["weights"])
    if case.endswith("16-mixed"):
        assert first["scaler"] != second["scaler"]


@pytest.mark.parametrize("name", ["async", "async with ema"])
def test_a_checkpoint_of_async_holds_one_model(ranks, name):
    first, second = (rank[name] for rank in ranks)
    assert len(first["files"]) == 3
    # on_save_checkpoint of the module sees the saved weights on both ranks; they do not change
    # until the file is written. Then it is called for both versions beside an average, of which
    # each rank has its own.
    calls = 3 if name == "async with ema" else 1
    assert len(first["copies"]) == 3 * calls
    assert same(first["copies"][::calls], second["copies"][::calls])
    assert same(first["saved"], second["saved"])
    for saved, (trained, copied) in zip(first["saved"], first["files"], strict=True):
        assert torch.equal(saved, trained)
        assert torch.equal(saved, copied)


def test_async_resumes_with_each_ranks_momenta(ranks):
    for rank in ranks:
        (_, ended), (begun, _) = rank["async"]["momenta"], rank["async resumed"]["momenta"]
        assert len(ended) == 8
        assert same(begun, ended)
    assert not same(ranks[0]["async"]["momenta"][1], ranks[1]["async"]["momenta"][1])


def test_async_validates_the_average_of_an_ema_unchanged(ranks):
    first, second = (rank["async with ema"] for rank in ranks)
    for rank in (first, second):
        assert rank["validated"]
        assert all(rank["validated"])
        assert torch.equal(rank["end"], rank["ema"])
    # After a validation all ranks still train one model.
    assert same(first["after"], second["after"])


# --- states that are refused ----------------------------------------------------------------------


def refused(tmp_path, then, now):
    """Train with some options and resume with others; return the error."""

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
    error = refused(tmp_path, one, {**one, "bucket_bytes": 100})
    assert "the checkpoint has each rank's weights in 1 buckets of" in error
    assert (
        "Fix: use the same bucket_bytes and frozen parameters as in the run that saved it" in error
    )
