"""Futures of ``reduce_bucket`` that never complete; torch waits for them without a timeout."""

import torch
from several_ranks import run
from torch.utils.data import DataLoader

from geartrain import hookimpl

from .cases import Net, ddp, samples


class Never:
    @hookimpl
    def reduce_bucket(self, run, bucket):
        return torch.futures.Future()


def wait_forever():
    trainer = ddp(devices=1, plugins=[Never()], strategy_options={"timeout": 1.0})
    trainer.fit(Net(), DataLoader(samples(), batch_size=4))


def test_a_rank_that_waits_for_a_future_ends_after_the_timeout(tmp_path):
    (rank,) = run(tmp_path, wait_forever, ranks=1)
    assert rank.end == "1"
    assert (
        "Never: rank 0 waits for the futures of reduce_bucket for more than --strategy.timeout 1. "
        "Fix: do not wait for a collective in a future's callback"
    ) in rank.err
