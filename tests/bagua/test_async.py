"""The algorithm async: a thread averages weights while ranks train."""

import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from several_ranks import kept_by
from torch import nn
from torch.utils.data import DataLoader

from geartrain import UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.turns import Turns

from . import reference_weights as reference
from .cases import Net, one_trainer, samples
from .hand import DEADLINE, RANKS, Hand, four_ranks, peers, this_rank, until
from .reference_weights import flat

pytestmark = pytest.mark.timeout(DEADLINE + 60)

#: The results of this process's rank, by the case's name.
noted = {}


def warm_up():
    hand = Hand(Asynchronous(warmup_steps=4, sync_interval_ms=5), kind="momentum")
    hand.run(4)
    before = hand.algorithm.rounds, hand.algorithm.reduces
    hand.run(4, 8, keep=False)
    hand.algorithm.pause()
    noted["warm-up"] = {
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
            time.sleep(0.003 * ((this_rank() + epoch) % 4))
        time.sleep(0.01 * ((this_rank() + epoch) % 4))
        algorithm.pause()
        algorithm.pause()
        weights.append(flat(hand.module))
        rounds.append(algorithm.rounds)
    hand.close()
    noted["aborts"] = {"weights": weights, "rounds": rounds, "steps": algorithm.steps}


def late():
    """Rank 0 stops first; rounds continue with it while the other ranks train.

    The weights differ so much that adding a difference rounds.
    """
    module = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        module.weight.mul_(100.0 ** this_rank())
    algorithm = Asynchronous(sync_interval_ms=1)
    hand = Hand(algorithm, module=module, optims=[])
    algorithm.start_step()
    dist.barrier()
    if this_rank():
        # A round may be running with flags from before rank 0 stopped.
        before = algorithm.rounds
        until(lambda: algorithm.rounds >= before + 5)
        with algorithm.computing(), torch.no_grad():
            module.weight.mul_(100.0 ** this_rank())
    algorithm.pause()
    noted["late"] = module.weight.detach().clone()
    hand.close()


def one_round():
    """Run a round while ranks train: it keeps their updates, and waits for its turn."""
    module = nn.Linear(3, 1, bias=False)
    nn.init.constant_(module.weight, float(this_rank()))
    algorithm = Asynchronous(sync_interval_ms=3_600_000)  # one round until pause wakes the thread
    hand = Hand(algorithm, module=module, optims=[])
    seen = {}
    with algorithm.computing():
        algorithm.start_step()
        time.sleep(0.2)  # a round that did not wait for its turn would be done
        seen["while computing"] = module.weight.detach().clone()
        with torch.no_grad():
            module.weight.add_(10.0 * this_rank())
    until(lambda: algorithm.rounds == 1)
    seen["after a round"] = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.add_(float(this_rank()))
    began = time.monotonic()
    algorithm.pause()
    seen["seconds"] = time.monotonic() - began
    seen["after pause"] = module.weight.detach().clone()
    hand.close()
    noted["round"] = {**seen, "rounds": algorithm.rounds}


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
    noted["kept"] = {
        "weights": module.weight.detach().clone(),
        "mean": total.item() / RANKS,
        "rounds": rounds,
    }
    hand.close()


def failing():
    """Record the thread's error, which the next step raises, and the time of close after it."""
    algorithm = Asynchronous(sync_interval_ms=1)
    hand = Hand(algorithm)
    with mock.patch.object(Bucket, "take_weights", None):  # a fault of the thread, on every rank
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
    time.sleep(1 if this_rank() == 0 else 0)
    began = time.monotonic()
    late.algorithm.close(failed=True)
    noted["failing"] = {"message": message, "seconds": time.monotonic() - began}
    until(lambda: late.algorithm._running.done())
    late.channel.close(10)


def run_each_case():
    with four_ranks():
        for part in (warm_up, aborts, late, one_round, kept_meanwhile, failing):
            part()
            dist.barrier()
    return noted


found = kept_by(run_each_case, ranks=RANKS, seconds=DEADLINE)


def test_gradients_are_averaged_only_in_the_warm_up(found):
    expected = reference.averaged_gradients(4, 4, "momentum")
    for rank in found:
        kept = rank["warm-up"]
        assert kept["before"] == (0, None)
        for mine, theirs in zip(kept["history"], expected, strict=True):
            # gloo adds in another order.
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert kept["rounds"] >= 1


def test_a_round_averages_the_weights_and_keeps_the_updates_of_training(found):
    for number, rank in enumerate(found):
        kept = rank["round"]
        # In training's turn the thread does not change the weights.
        assert torch.equal(kept["while computing"], torch.full((1, 3), float(number)))
        # Each rank added 10 times its number before the copy: the mean of 0, 11, 22 and 33.
        assert torch.equal(kept["after a round"], torch.full((1, 3), 16.5))
        assert torch.equal(kept["after pause"], torch.full((1, 3), 18.0))
        assert kept["seconds"] < 30  # the interval is an hour: pause woke the thread
        assert kept["rounds"] == 2


def test_no_update_is_lost_and_a_busy_rank_gives_the_thread_a_turn(found):
    for rank in found:
        kept = rank["kept"]
        assert kept["rounds"] >= 5
        torch.testing.assert_close(
            kept["weights"], torch.full((1, 2), kept["mean"]), rtol=1e-4, atol=0
        )


def test_ranks_have_equal_weights_at_every_pause(found):
    """Bagua's test. Between pauses, ranks train no, one or two steps, and are late in turn."""
    first = found[0]["aborts"]
    for rank in found:
        kept = rank["aborts"]
        assert kept["steps"] == 12
        assert kept["rounds"] == first["rounds"]
        assert kept["rounds"][-1] >= 6
        for mine, theirs in zip(kept["weights"], first["weights"], strict=True):
            assert torch.equal(mine, theirs)


def test_rounds_continue_until_all_ranks_stop_and_the_last_round_gives_the_same_bits(found):
    first = found[0]["late"]
    assert first.abs().max() > 100  # includes updates of other ranks after rank 0 stopped
    for rank in found:
        assert torch.equal(rank["late"], first)


def test_a_threads_error_is_raised_in_the_next_step(found):
    for rank in found:
        assert "not callable" in rank["failing"]["message"]


def test_a_run_that_failed_waits_for_no_rank(found):
    for rank in found:
        assert rank["failing"]["seconds"] < 4  # the group's timeout is 5


def alone():
    run = SimpleNamespace(
        loop=SimpleNamespace(needs_closure=False),
        module=torch.nn.Linear(1, 1),
        optimizers=[],
        schedulers=[],
    )
    return Context(run, [], None, Peers(None, 0, 1, (0,)))


def test_validation_counts_no_step():
    seen, strategy = [], BaguaStrategy("async", warmup_steps=4)

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            seen.append(
                (self.trainer.global_step, strategy.algorithm.steps, strategy.algorithm.warm)
            )

    trainer = one_trainer(
        strategy=strategy, devices=1, val_check_interval=2, num_sanity_val_steps=2
    )
    trainer.fit(Validated(), DataLoader(samples(), 8), DataLoader(samples(16), 8))
    assert seen == [(step, step, step >= 4) for step in (0, 2, 4, 6) for _ in range(2)]


def test_a_resumed_run_is_as_warm_as_it_was():
    algorithm, again = Asynchronous(warmup_steps=2), Asynchronous(warmup_steps=2)
    algorithm.set_up(alone())
    algorithm.end_step()
    algorithm.end_step()
    again.load_state_dict(algorithm.state_dict())
    assert again.state_dict() == algorithm.state_dict()
    again.set_up(alone())
    assert again.warm
    assert again.reduces is None


def test_a_waiting_thread_gets_the_next_turn():
    turns, order, inside = Turns(), [], threading.Event()

    def communicate():
        with turns.communication():
            order.append("communication")

    thread = threading.Thread(target=communicate)
    with turns.training(), turns.training():
        order.append("training")
        thread.start()
        while not turns._wanted:
            time.sleep(0.001)
        with turns.training():  # nested: does not wait
            inside.set()
    with turns.training():
        order.append("training")
    thread.join(30)
    assert inside.is_set()
    assert order == ["training", "communication", "training"]


def test_a_released_turn_is_taken_again():
    turns, order = Turns(), []

    def communicate():
        for _ in range(2):
            with turns.communication():
                order.append("communication")

    first, second = threading.Thread(target=communicate), threading.Thread(target=communicate)
    with turns.training(), turns.training():
        with turns.given_up():
            first.start()
            first.join(30)
        second.start()
        while not turns._wanted:
            time.sleep(0.001)
        order.append("training")
    second.join(30)
    assert order == [*["communication"] * 2, "training", *["communication"] * 2]
    with turns.given_up(), turns.communication():  # no thread has a turn
        pass


def test_an_error_inside_a_turn_ends_it():
    turns = Turns()
    for turn in (turns.training, turns.communication, turns.training):
        with pytest.raises(KeyError), turn():
            raise KeyError


@pytest.mark.parametrize(
    "options",
    [
        {"peer_selection_mode": "shift_one"},
        {"sync_interval_ms": 0},
        {"sync_interval_ms": float("nan")},
        {"sync_interval_ms": float("inf")},
        {"warmup_steps": -1},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Asynchronous(**options)
