"""A policy learns to balance the pole; each rank plays games of its own."""

import pytest
import torch

import geartrain as gt

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


@pytest.mark.example
@pytest.mark.parametrize(
    "options",
    [["--strategy", "single"], ["--strategy", "ddp", "--devices", 2, "--model.games", 8]],
    ids=lambda options: options[1],
)
def test_the_pole_stays_up(example, report, options):
    ran = example("cartpole", "--max-epochs", 6, "--seed", 1, *options)
    metrics = ran.metrics()
    assert metrics["val_steps"] > 150  # of 200; an untrained policy lasts 10 to 50
    assert ran.flushed("train_steps")[0] < 80
    assert "val_steps" in report(ran)


@pytest.fixture(scope="module")
def cartpole(part):
    return part("cartpole")


def trainer(**options):
    return gt.Trainer(accelerator="cpu", max_epochs=1, seed=1, enable_progress_bar=False, **options)


def test_games_end_when_the_pole_falls(cartpole):
    torch.manual_seed(0)
    policy = torch.nn.Linear(4, 2)
    states, actions, advantages = cartpole.Games(policy, games=5, batches=1).play()
    assert states.shape == (len(actions), 4)
    assert advantages.shape == actions.shape
    assert cartpole.upright(states).all()  # no step of a lost game
    assert len(states) < 5 * cartpole.LIMIT


def test_a_push_moves_the_cart_and_tilts_the_pole_back(cartpole):
    """The values are those of Gymnasium 1.4's CartPole for the same state and push."""
    state = torch.tensor([[0.01, -0.02, 0.03, 0.04]])
    pushed = cartpole.advance(state, torch.tensor([1]))
    expected = [[0.0096, 0.1746792, 0.0308, -0.2430687]]
    torch.testing.assert_close(pushed, torch.tensor(expected), atol=1e-6, rtol=0)


def test_one_epoch_plays_and_steps(cartpole):
    module = cartpole.CartPole(games=2, batches=2, hidden=4)
    run = trainer()
    run.fit(module)
    assert run.global_step == 2
    assert run.callback_metrics["val_steps"] > 0


def test_loader_workers_are_refused(cartpole):
    module = cartpole.CartPole(games=2, batches=1)
    loader = torch.utils.data.DataLoader(
        cartpole.Games(module.policy, 2, 1), batch_size=None, num_workers=1
    )
    with pytest.raises(gt.UsageError, match="copy of the policy"):
        trainer().fit(module, loader)
