"""Call an algorithm's methods as the strategy does, on four ranks.

Cases of two ranks run twice at the same time: on ranks 0 and 1, and on ranks 2 and 3.
"""

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.buckets import make_buckets
from geartrain_bagua.channel import Channel

from .reference_weights import backward, flat, net, optimizers

RANKS = 4
#: Seconds for all cases of a test file; they take 10 on two idle cores.
DEADLINE = 240


def this_rank():
    return int(os.environ["RANK"])


def peers(*ranks, seconds=60):
    """Return a group of these ranks, or ``None`` on other ranks. All ranks call it in one order."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
    rank = this_rank()
    return Peers(group, ranks.index(rank), len(ranks), ranks) if rank in ranks else None


def this_ranks(*groups):
    return next(group for group in groups if group is not None)


@contextmanager
def four_ranks():
    """Join the four ranks, and leave at the end."""
    global ALL, LEADERS, PAIR, ONE
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ALL, LEADERS = peers(0, 1, 2, 3), peers(0, 2)
    PAIR = this_ranks(peers(0, 1), peers(2, 3))
    ONE = this_ranks(peers(0), peers(1), peers(2), peers(3))
    yield
    dist.barrier()
    dist.destroy_process_group()


class Hand:
    """Calls an algorithm as the strategy does."""

    def __init__(
        self,
        algorithm,
        ranks=4,
        node=None,
        kind="sgd",
        bucket_bytes=2**20,
        module=None,
        optims=None,
        closure=False,
        group=None,
    ):
        self.algorithm = algorithm
        self.module = net() if module is None else module
        self.optimizers = optimizers(self.module, kind) if optims is None else optims
        everyone, nodes, leaders = group or (ALL if ranks == 4 else PAIR), None, None
        if node is not None:
            nodes, leaders = (
                (PAIR, LEADERS if this_rank() % 2 == 0 else None)
                if node < ranks
                else (everyone, ONE if everyone.rank == 0 else None)
            )
        self.buckets = make_buckets(self.module.parameters(), size=bucket_bytes)
        self.channel = Channel()
        run = SimpleNamespace(
            loop=SimpleNamespace(needs_closure=closure),
            module=self.module,
            optimizers=self.optimizers,
            schedulers=[],
        )
        self.context = Context(run, self.buckets, self.channel, everyone, nodes, leaders)
        self.rank, self.history, self.seen = everyone.rank, [], []
        algorithm.set_up(self.context)

    def step(self, step, micros=1, clip=None, work=None, keep=True):
        algorithm = self.algorithm
        algorithm.start_step()
        before = flat(self.module)
        with algorithm.computing():
            if work is None:
                backward(self.module, self.rank, step, micros, clip)
            else:
                work()
            self.seen.append(torch.equal(before, flat(self.module)))
        if algorithm.reduces == "gradients":
            for bucket in self.buckets:
                bucket.take_gradients()
                self.channel.submit(lambda bucket=bucket: algorithm.reduce(bucket)).result()
                bucket.give_gradients()
        algorithm.end_backward()
        for optimizer in self.optimizers:
            with algorithm.computing():
                optimizer.step()
        algorithm.end_step()
        if keep:
            self.history.append(flat(self.module))

    def run(self, *steps, **options):
        for step in range(*steps):
            self.step(step, **options)
        return self

    def close(self):
        self.algorithm.close(failed=False)
        assert self.channel.close(30)
        return self.history


def case(algorithm, steps=6, ranks=4, node=None, kind="sgd", bucket_bytes=2**20, **options):
    """Return the weights after each step, and other results."""
    hand = Hand(algorithm, ranks, node, kind, bucket_bytes).run(steps, **options)
    kept = {
        "history": hand.close(),
        "seen": hand.seen,
        "buckets": [bucket.numel for bucket in hand.buckets],
    }
    if getattr(algorithm, "replicas", None):
        for which in ("own", "left", "right"):
            kept[which] = torch.cat([getattr(replicas, which) for replicas in algorithm.replicas])
    return kept


def elastic(make, kind="momentum"):
    """Run three steps, and load the state on another number of ranks: only the steps are loaded."""
    first = Hand(make(), kind=kind).run(3)
    first.algorithm.pause()
    state = first.algorithm.state_dict()
    first.close()
    algorithm = make()
    algorithm.load_state_dict(state)
    hand = Hand(algorithm, ranks=2, kind=kind)
    kept = {"steps": algorithm.steps, "weights": flat(hand.module)}
    hand.close()
    return kept


def assert_starts_from_rank_0(kept, steps):
    """Check that a run that resumes on other ranks has the steps and rank 0's weights."""
    assert kept["steps"] == steps
    assert torch.equal(kept["weights"], flat(net()))


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)
