r"""Policy gradients: a policy learns to balance a pole by playing, without a data set.

geartrain fit examples/cartpole.py --max-epochs 6 --seed 1
geartrain fit examples/cartpole.py --max-epochs 6 --seed 1 --strategy ddp --devices 2 \
    --model.games 8
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import geartrain as gt

LIMIT = 200  # steps, after which a game is won


def begin(games: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the first states ``[games, 4]``: position, speed, angle and its speed."""
    return 0.1 * torch.rand(games, 4, generator=generator) - 0.05


def advance(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return the states after 0.02 s, in which the carts are pushed to the left (0) or right (1).

    Source: Barto, Sutton and Anderson 1983, with the constants of Gymnasium's CartPole-v0.
    """
    _, speed, angle, turn = state.unbind(dim=1)
    force, sin, cos = action * 20.0 - 10.0, angle.sin(), angle.cos()
    push = (force + 0.05 * turn**2 * sin) / 1.1
    turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = torch.stack([speed, push - 0.05 * turning * cos / 1.1, turn, turning], dim=1)
    return state + 0.02 * change


def upright(state: torch.Tensor) -> torch.Tensor:
    """Return for each game if the cart is on the track and the pole within 12 degrees."""
    return (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.2095)


class Games(IterableDataset):
    """Batches of complete games, which the policy plays while it learns.

    Args:
        policy: maps states ``[games, 4]`` to logits ``[games, 2]``.
        games: games in one batch of one process.
        batches: batches in one epoch.
    """

    def __init__(self, policy: nn.Module, games: int, batches: int) -> None:
        self.policy, self.games, self.batches = policy, games, batches

    def __iter__(self):
        if get_worker_info() is not None:
            raise gt.UsageError(
                "a loader worker would play with a copy of the policy that never learns. "
                "Fix: num_workers=0"
            )
        for _ in range(self.batches):
            yield self.play()

    @torch.no_grad()
    def play(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states ``[steps, 4]``, actions ``[steps]`` and advantages ``[steps]``."""
        device = next(self.policy.parameters()).device
        # Every rank draws its own games: geartrain adds the rank to the seed.
        state, history = begin(self.games).to(device), []
        alive = torch.ones(self.games, dtype=torch.bool, device=device)
        while alive.any() and len(history) < LIMIT:
            action = self.policy(state).softmax(dim=1).multinomial(1).squeeze(1)
            history.append((state, action, alive))
            state = advance(state, action)
            alive = alive & upright(state)
        states, actions, played = (torch.stack(column) for column in zip(*history, strict=True))
        # A reward of 1 a step, discounted; its mean over the games of the same step is no merit.
        returns = torch.zeros(len(history) + 1, self.games, device=device)
        for i in reversed(range(len(history))):
            returns[i] = played[i] * (1 + 0.99 * returns[i + 1])
        advantages = returns[:-1] - returns[:-1].sum(1, keepdim=True) / played.sum(1, keepdim=True)
        return states[played], actions[played], advantages[played] / (returns.std() + 1e-6)


class CartPole(gt.Module):
    """REINFORCE with a small policy from states ``[batch, 4]`` to logits ``[batch, 2]``.

    Args:
        games: games in one step of one process.
        batches: steps in one epoch.
        hidden: units in the hidden layer.
        lr: Adam's learning rate.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696
    """

    def __init__(
        self, games: int = 16, batches: int = 10, hidden: int = 64, lr: float = 5e-3
    ) -> None:
        super().__init__()
        self.games, self.batches, self.lr = games, batches, lr
        self.policy = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def train_dataloader(self):
        return DataLoader(Games(self.policy, self.games, self.batches), batch_size=None)

    def training_step(self, batch, batch_idx):
        states, actions, advantages = batch
        chosen = self.policy(states).log_softmax(dim=1).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.log("train_steps", len(states) / self.games, prog_bar=True, sync_dist=True)
        # Ranks play unequal numbers of steps; the weight gives each step equal influence.
        return {"loss": -(chosen * advantages).sum(), "weight": len(states)}

    def val_dataloader(self):
        return DataLoader(TensorDataset(begin(64, torch.Generator().manual_seed(0))), batch_size=32)

    def validation_step(self, batch, batch_idx):
        """Play without chance; log the mean number of steps until the pole falls."""
        (state,) = batch
        steps = torch.zeros(len(state), device=state.device)
        alive = torch.ones_like(steps, dtype=torch.bool)
        while alive.any() and steps.max() < LIMIT:
            state = advance(state, self.policy(state).argmax(dim=1))
            steps += alive
            alive = alive & upright(state)
        self.log("val_steps", steps.mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    gt.cli(CartPole)
