"""Four ranks call the algorithms' methods as the strategy does, and save their results in a folder.

Cases of two ranks run twice at the same time: on ranks 0 and 1, and on ranks 2 and 3.
"""

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from types import SimpleNamespace

import torch
import torch.distributed as dist
from reference_weights import backward, flat, net, optimizers
from torch import nn

from geartrain import TrainingError, UsageError
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.algorithms.decentralized import Decentralized
from geartrain_bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from geartrain_bagua.buckets import make_buckets
from geartrain_bagua.channel import Channel

RANK, RANKS = 0, 4
found = {}


def peers(*ranks, seconds=60):
    """Return a group of these ranks, or ``None`` on other ranks. All ranks call it in one order."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
    return Peers(group, ranks.index(RANK), len(ranks), ranks) if RANK in ranks else None


def mine(*groups):
    return next(group for group in groups if group is not None)


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
                (PAIR, LEADERS if RANK % 2 == 0 else None)
                if node < ranks
                else (everyone, ONE if everyone.rank == 0 else None)
            )
        self.buckets = make_buckets(self.module.parameters(), size=bucket_bytes)
        self.channel = Channel()
        run = SimpleNamespace(
            needs_closure=closure, module=self.module, optimizers=self.optimizers, schedulers=[]
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


def case(name, algorithm, steps=6, ranks=4, node=None, kind="sgd", bucket_bytes=2**20, **options):
    hand = Hand(algorithm, ranks, node, kind, bucket_bytes).run(steps, **options)
    kept = {
        "history": hand.close(),
        "seen": hand.seen,
        "buckets": [bucket.numel for bucket in hand.buckets],
    }
    if getattr(algorithm, "replicas", None):
        for which in ("own", "left", "right"):
            kept[which] = torch.cat([getattr(replicas, which) for replicas in algorithm.replicas])
    found[name] = kept


def elastic(name, make, kind="momentum"):
    """Run three steps, and load the state on another number of ranks: only the steps are loaded."""
    first = Hand(make(), kind=kind).run(3)
    first.algorithm.pause()
    state = first.algorithm.state_dict()
    first.close()
    algorithm = make()
    algorithm.load_state_dict(state)
    hand = Hand(algorithm, ranks=2, kind=kind)
    found[f"{name} on other ranks"] = {"steps": algorithm.steps, "weights": flat(hand.module)}
    hand.close()


def refused(make):
    try:
        make()
    except UsageError as error:
        return str(error)
    return None


# --- async ----------------------------------------------------------------------------------------


def warm_up():
    hand = Hand(Asynchronous(warmup_steps=4, sync_interval_ms=5), kind="momentum")
    hand.run(4)
    before = hand.algorithm.rounds, hand.algorithm.reduces
    hand.run(4, 8, keep=False)
    hand.algorithm.pause()
    found["async warm-up"] = {
        "history": hand.history,
        "before": before,
        "rounds": hand.algorithm.rounds,
        "weights": flat(hand.module),
    }
    hand.close()


def aborts():
    """Bagua's test: resume and pause twice each time, at different times on each rank."""
    hand = Hand(Asynchronous(sync_interval_ms=20, warmup_steps=3), optims=None)
    algorithm, weights, rounds = hand.algorithm, [], []
    for epoch in range(12):
        algorithm.resume()
        algorithm.resume()
        for step in range(epoch % 3):  # also no step
            hand.step(10 * epoch + step, keep=False)
            time.sleep(0.003 * ((RANK + epoch) % 4))
        time.sleep(0.01 * ((RANK + epoch) % 4))
        algorithm.pause()
        algorithm.pause()
        weights.append(flat(hand.module))
        rounds.append(algorithm.rounds)
    hand.close()
    found["async aborts"] = {"weights": weights, "rounds": rounds, "steps": algorithm.steps}


def late():
    """Rank 0 stops first; rounds continue with it while the other ranks train.

    The weights differ so much that adding a difference rounds.
    """
    module = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        module.weight.mul_(100.0**RANK)
    algorithm = Asynchronous(sync_interval_ms=1)
    hand = Hand(algorithm, module=module, optims=[])
    algorithm.start_step()
    dist.barrier()
    if RANK:
        # A round may be running with flags from before rank 0 stopped.
        before = algorithm.rounds
        until(lambda: algorithm.rounds >= before + 5)
        with algorithm.computing(), torch.no_grad():
            module.weight.mul_(100.0**RANK)
    algorithm.pause()
    found["async late"] = module.weight.detach().clone()
    hand.close()


def one_round():
    """Run a round while ranks train: it keeps their updates, and waits for its turn."""
    module = nn.Linear(3, 1, bias=False)
    nn.init.constant_(module.weight, float(RANK))
    algorithm = Asynchronous(sync_interval_ms=3_600_000)  # one round until pause wakes the thread
    hand = Hand(algorithm, module=module, optims=[])
    seen = {}
    with algorithm.computing():
        algorithm.start_step()
        time.sleep(0.2)  # a round that did not wait for its turn would be done
        seen["while computing"] = module.weight.detach().clone()
        with torch.no_grad():
            module.weight.add_(10.0 * RANK)
    until(lambda: algorithm.rounds == 1)
    seen["after a round"] = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.add_(float(RANK))
    began = time.monotonic()
    algorithm.pause()
    seen["seconds"] = time.monotonic() - began
    seen["after pause"] = module.weight.detach().clone()
    hand.close()
    found["async round"] = {**seen, "rounds": algorithm.rounds}


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def kept_meanwhile():
    """Train while rounds run: no update is lost, and the thread gets its turn on a busy rank."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    algorithm = Asynchronous(sync_interval_ms=1)
    hand = Hand(algorithm, module=module, optims=[])
    algorithm.start_step()
    added, end = 0, time.monotonic() + 60
    while algorithm.rounds < 5:  # training releases the weights only between two iterations
        assert time.monotonic() < end
        with algorithm.computing(), torch.no_grad():
            for _ in range(50):
                module.weight.add_(1.0)
            added += 50
    rounds = algorithm.rounds
    algorithm.pause()
    total = torch.tensor(float(added), dtype=torch.float64)
    dist.all_reduce(total)
    found["async kept"] = {
        "weights": module.weight.detach().clone(),
        "mean": total.item() / RANKS,
        "rounds": rounds,
    }
    hand.close()


def failing():
    """Record the thread's error, which the next step raises, and the time of close after it."""
    algorithm = Asynchronous(sync_interval_ms=1)
    hand = Hand(algorithm)
    hand.buckets[0].take_weights = None  # a fault of the thread, on every rank
    algorithm.start_step()
    until(lambda: algorithm._running.done())
    message = None
    try:
        algorithm.start_step()
    except TypeError as error:
        message = str(error)
    algorithm.close(failed=True)
    hand.channel.close(10)
    # The threads of other ranks end immediately. Rank 0 continues to train, and its thread waits
    # for them in a collective until the group's timeout.
    late = Hand(Asynchronous(sync_interval_ms=5), optims=[], group=peers(0, 1, 2, 3, seconds=5))
    late.algorithm.start_step()
    time.sleep(1 if RANK == 0 else 0)
    began = time.monotonic()
    late.algorithm.close(failed=True)
    found["async failing"] = {"message": message, "seconds": time.monotonic() - began}
    until(lambda: late.algorithm._running.done())
    late.channel.close(10)


def unfrozen(make):
    """Return the error for a parameter that is in no bucket but is unfrozen later."""
    module = net()
    module.fc3.weight.requires_grad_(False)
    hand = Hand(make(), module=module)
    hand.step(0, keep=False)
    module.fc3.weight.requires_grad_(True)
    try:
        hand.algorithm.start_step()
    except TrainingError as error:
        return str(error)
    finally:
        hand.close()


def main():
    torch.set_num_threads(1)
    for mode, interval in (("all", 1), ("all", 3), ("shift_one", 1), ("shift_one", 2)):
        for ranks in (2, 4):
            case(f"{mode} {interval} {ranks}", Decentralized(False, mode, interval), ranks=ranks)
    case("all nodes", Decentralized(), node=2)
    case("shift_one nodes", Decentralized(peer_selection_mode="shift_one"), node=2)
    case("all one node", Decentralized(), node=4)
    case("momentum", Decentralized(False), ranks=2, kind="momentum")
    case("two optimizers", Decentralized(False), ranks=2, kind="two")
    case("accumulation and clipping", Decentralized(False), ranks=2, micros=3, clip=0.01)
    case("many buckets", Decentralized(False), ranks=2, bucket_bytes=64)
    for interval, ranks in ((1, 2), (1, 4), (3, 4)):
        case(f"low {interval} {ranks}", LowPrecisionDecentralized(False, interval), ranks=ranks)
    case("low many buckets", LowPrecisionDecentralized(False), bucket_bytes=64)
    case("low momentum", LowPrecisionDecentralized(False), kind="momentum")
    case("low nodes", LowPrecisionDecentralized(), node=2)
    case("low one node", LowPrecisionDecentralized(), ranks=2, node=2)
    elastic("decentralized", lambda: Decentralized(False, "shift_one", 2))
    elastic("low precision", lambda: LowPrecisionDecentralized(False, 2))
    found["unfrozen"] = [
        unfrozen(make) for make in (Decentralized, LowPrecisionDecentralized, Asynchronous)
    ]
    found["closure"] = refused(lambda: Hand(Decentralized(False), closure=True))
    found["odd nodes"] = (
        refused(lambda: Hand(Decentralized(peer_selection_mode="shift_one"), node=4))
        if RANK == 0
        else None
    )
    for part in (warm_up, aborts, late, one_round, kept_meanwhile, failing):
        part()
        dist.barrier()


def rank_main(rank):
    global RANK, ALL, LEADERS, PAIR, ONE
    RANK = rank
    store = dist.FileStore("store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    ALL, LEADERS = peers(0, 1, 2, 3), peers(0, 2)
    PAIR = mine(peers(0, 1), peers(2, 3))
    ONE = mine(peers(0), peers(1), peers(2), peers(3))
    main()
    torch.save(found, f"found-{RANK}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    # Forked, so that torch is imported once. No thread of torch runs yet.
    ranks = [
        multiprocessing.get_context("fork").Process(target=rank_main, args=(rank,))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    tests = os.getppid()
    while running and not any(process.exitcode for process in ranks) and os.getppid() == tests:
        for sentinel in wait(running, timeout=1):
            running.pop(sentinel).join()
    for process in running.values():  # a rank has failed, or pytest has ended
        process.join(1)
        process.kill()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
