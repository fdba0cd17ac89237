"""The algorithm async: a thread averages weights while ranks train."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from geartrain import UsageError
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.asynchronous import Asynchronous
from geartrain_bagua.turns import Turns

from . import reference_weights as reference
from .cases import Net, one_trainer, samples
from .weights_ranks import DEADLINE, found

#: The first test runs the program of all three files.
pytestmark = pytest.mark.timeout(DEADLINE + 60)


def test_gradients_are_averaged_only_in_the_warm_up():
    expected = reference.averaged_gradients(4, 4, "momentum")
    for rank in found():
        kept = rank["async warm-up"]
        assert kept["before"] == (0, None)
        for mine, theirs in zip(kept["history"], expected, strict=True):
            # gloo adds in another order.
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert kept["rounds"] >= 1


def test_a_round_averages_the_weights_and_keeps_the_updates_of_training():
    for number, rank in enumerate(found()):
        kept = rank["async round"]
        # In training's turn the thread does not change the weights.
        assert torch.equal(kept["while computing"], torch.full((1, 3), float(number)))
        # Each rank added 10 times its number before the copy: the mean of 0, 11, 22 and 33.
        assert torch.equal(kept["after a round"], torch.full((1, 3), 16.5))
        assert torch.equal(kept["after pause"], torch.full((1, 3), 18.0))
        assert kept["seconds"] < 30  # the interval is an hour: pause woke the thread
        assert kept["rounds"] == 2


def test_no_update_is_lost_and_a_busy_rank_gives_the_thread_a_turn():
    for rank in found():
        kept = rank["async kept"]
        assert kept["rounds"] >= 5
        torch.testing.assert_close(
            kept["weights"], torch.full((1, 2), kept["mean"]), rtol=1e-4, atol=0
        )


def test_ranks_have_equal_weights_at_every_pause():
    """Bagua's test. Between pauses, ranks train no, one or two steps, and are late in turn."""
    first = found()[0]["async aborts"]
    for rank in found():
        kept = rank["async aborts"]
        assert kept["steps"] == 12
        assert kept["rounds"] == first["rounds"]
        assert kept["rounds"][-1] >= 6
        for mine, theirs in zip(kept["weights"], first["weights"], strict=True):
            assert torch.equal(mine, theirs)


def test_rounds_continue_until_all_ranks_stop_and_the_last_round_gives_the_same_bits():
    first = found()[0]["async late"]
    assert first.abs().max() > 100  # includes updates of other ranks after rank 0 stopped
    for rank in found():
        assert torch.equal(rank["async late"], first)


def test_a_threads_error_is_raised_in_the_next_step():
    for rank in found():
        assert "not callable" in rank["async failing"]["message"]


def test_a_run_that_failed_waits_for_no_rank():
    for rank in found():
        assert rank["async failing"]["seconds"] < 4  # the group's timeout is 5


def alone():
    run = SimpleNamespace(
        needs_closure=False, module=torch.nn.Linear(1, 1), optimizers=[], schedulers=[]
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
