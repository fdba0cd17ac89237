"""The plugin ``sentinel``: a run that stands still ends, and names the late rank and its line."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from several_ranks import run, succeeded
from small_models import Net, loader, trainer

import geartrain as gt
from geartrain_resilience.sentinel import Place, Sentinel, differing, late_ranks, verdict


def place(rank, events=7, collective="", **collectives):
    calls = {number: (call, f" (a.py:{rank})") for number, call in collectives.items()}
    return Place(rank, events, "on_step_end, 3 steps done", collective, " (a.py:1)", "", calls)


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ([place(0, collective="barrier"), None], [1]),
        ([place(0, collective="barrier"), place(1)], [1]),
        ([place(0), place(1, collective="backward")], [0]),
        ([place(0, events=8, collective="barrier"), place(1, collective="barrier")], [1]),
        ([place(0, collective="barrier"), place(1), place(2, events=6)], [1, 2]),
        ([place(0), place(1)], []),
        ([place(0)], []),
    ],
)
def test_the_late_ranks(places, late):
    assert late_ranks(places) == late


def test_the_message_names_the_late_rank_or_all():
    places = [place(0, collective="barrier"), None]
    message = verdict(places, [1], 30)
    assert "for 30 s; the others wait for rank 1: rank 1 does not answer. Fix: " in message
    message = verdict([place(0), place(1)], [], 30)
    assert "rank 0 is in no collective (a.py:1), after on_step_end, 3 steps done; rank 1" in message


def test_the_first_collective_that_differs():
    first = place(0, **{"0 9": "barrier", "0 10": "all_reduce [1]", "0 11": "broadcast [2]"})
    other = place(1, **{"0 9": "barrier", "0 10": "all_reduce [2]", "0 11": "broadcast [3]"})
    assert differing([first, other, None]) == (
        "The ranks' collectives differ: rank 0: all_reduce [1] (a.py:0); "
        "rank 1: all_reduce [2] (a.py:1)"
    )
    assert differing([first, first]) == ""
    assert differing([None, None]) == ""


def fit(step, strategy="ddp", seconds=0.4):
    """Train; ``step`` is called in the third step with the rank and the plugin."""

    class Standing(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                step(self.trainer.global_rank, plugin)
            return super().training_step(batch, batch_idx)

    plugin = Sentinel(seconds=seconds)
    devices = "auto" if strategy == "ddp" else 1
    one = trainer(plugins=[plugin], strategy=strategy, devices=devices, max_epochs=1)
    one.fit(Standing(), loader())


def stand_still():
    threading.Event().wait()


def work_without_end(plugin):
    while True:
        plugin.events += 1


def one_is_late(late, works):
    os.environ["GEARTRAIN_PATIENCE"] = "unwind=0.3,grace=0.3"

    def step(rank, plugin):
        if rank == late:
            work_without_end(plugin) if works else stand_still()

    fit(step)


@pytest.mark.parametrize(
    ("late", "works"),
    [(0, False), (1, True), pytest.param(1, False, marks=pytest.mark.matrix)],
)
def test_all_ranks_end_if_one_is_late(tmp_path, late, works):
    ranks = run(tmp_path, one_is_late, late, works)
    assert [rank.end for rank in ranks] == ["1", "1"]
    message = f"the others wait for rank {late}: rank {late} is in no collective (test_sentinel.py:"
    assert message in ranks[1 - late].error
    # The stack of each rank is printed once.
    assert f"in {'work_without_end' if works else 'stand_still'}\n" in ranks[0].err
    assert "in backward\n" in ranks[0].err
    assert "sentinel" not in ranks[1].err.partition("Traceback")[0]


def other_collective():
    os.environ["GEARTRAIN_PATIENCE"] = "unwind=0.3,grace=0.3"
    fit(lambda rank, _: dist.barrier() if rank else dist.all_reduce(torch.ones(1)))


def test_the_collectives_that_differ_are_named(tmp_path):
    ranks = run(tmp_path, other_collective)
    assert {rank.end for rank in ranks} == {"1"}
    assert "differ: rank 0: all_reduce [1] (test_sentinel.py:" in ranks[0].err
    assert "; rank 1: barrier (test_sentinel.py:" in ranks[0].err


def trains_to_the_end():
    fit(lambda *_: None, seconds=1e6)
    return [thread.name for thread in threading.enumerate()]


def test_a_run_that_trains_leaves_no_thread(tmp_path):
    for rank in succeeded(tmp_path, trains_to_the_end):
        assert "geartrain-sentinel" not in rank.result


def test_one_rank_ends_as_well(monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "grace=0.1")
    message = r"no batch and no step for 0\.2 s; rank 0 is in no collective \(test_sentinel\.py:"
    with pytest.raises(gt.TrainingError, match=message):
        fit(lambda *_: stand_still(), "single", seconds=0.2)


def test_an_interrupt_by_the_user_stays_one():
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(interrupt, "single", seconds=1e6)


def test_refusals():
    with pytest.raises(gt.UsageError, match=r"must be above 0\. Fix: seconds=300"):
        Sentinel(seconds=0)
