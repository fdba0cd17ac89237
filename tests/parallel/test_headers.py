"""Headers of collectives on two ranks; tests/drills/test_rank_asymmetry.py has lone collectives."""

import pytest
import torch
from several_ranks import failed, kept_by

import geartrain as gt
from geartrain import hookimpl


class Calls:
    def __init__(self, function):
        self.function, self.found = function, None

    @hookimpl
    def on_run_start(self, run):
        self.found = self.function(run, run.world.rank)


class Net(gt.Module):
    def validation_step(self, batch, batch_idx):
        pass


def on_ranks(function, **options):
    calls = Calls(function)
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        plugins=[calls],
        strategy_options=options,
        enable_progress_bar=False,
    )
    trainer.validate(Net(), [torch.ones(1)])
    return calls.found


def refused(run, tensor):
    with pytest.raises(gt.TrainingError) as caught:
        run.hooks.all_gather(run=run, tensor=tensor)
    return str(caught.value)


def sizes():
    """Exchange contents that fit in a header, larger ones, and some that do not match."""

    def exchange(run, rank):
        hooks, large = run.hooks, {"x": list(range(1000)), "from": rank}
        return {
            "few": hooks.log_sync(run=run, values=torch.tensor([rank, 0.1], dtype=torch.float64)),
            "many": hooks.log_sync(run=run, values=torch.full((500,), rank, dtype=torch.float64)),
            "small": hooks.broadcast(run=run, obj=("small", rank), src=1),
            "large": hooks.broadcast(run=run, obj=large, src=1),
            "deep": hooks.all_gather(run=run, tensor=torch.full((1,) * 64, float(rank))),
            "shapes": refused(run, torch.zeros(2, 2 + rank)),
            "types": refused(run, torch.zeros(2, dtype=(torch.float32, torch.float64)[rank])),
        }

    return on_ranks(exchange)


exchanged = kept_by(sizes)


def test_contents_of_any_size_are_exchanged(exchanged):
    for kept in exchanged:
        assert kept["few"].tolist() == [[0.0, 0.1], [1.0, 0.1]]
        assert kept["few"].dtype == torch.float64
        assert kept["many"].tolist() == [[0.0] * 500, [1.0] * 500]
        assert kept["small"] == ("small", 1)
        assert kept["large"] == {"x": list(range(1000)), "from": 1}
        assert kept["deep"].shape == (2, *(1,) * 64)
        assert kept["deep"].flatten().tolist() == [0.0, 1.0]


def test_tensors_that_do_not_match_are_an_error_on_every_rank(exchanged):
    for kept in exchanged:
        assert "rank 0 has the shape [2, 2] and rank 1 [2, 3]" in kept["shapes"]
        assert "rank 0 and rank 1 have tensors of different types" in kept["types"]


def broadcast_from_itself():
    on_ranks(lambda run, rank: run.hooks.broadcast(run=run, obj=1, src=rank))


def wait_for_a_late_rank():
    def late(run, rank):
        if rank == 1:
            run.store.wait(["the other has failed"])
        try:
            run.hooks.barrier(run=run)
        finally:
            run.store.set("the other has failed", "1")

    on_ranks(late, timeout=1.0)


def test_different_sources_are_an_error_with_the_lines(tmp_path):
    for rank in failed(tmp_path, broadcast_from_itself):
        assert "rank 0 in broadcast from rank 0 (" in rank.error
        assert "test_headers.py:" in rank.error


def test_a_rank_that_waited_in_vain_names_the_late_one(tmp_path):
    error = failed(tmp_path, wait_for_a_late_rank)[0].error
    assert "barrier (" in error
    assert "waited for rank 1 (last in " in error
    assert "timed out waiting" in error.lower()
