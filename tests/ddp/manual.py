"""Modules with manual optimisation, and the same training in plain torch in one process."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

RANKS = 2


class Two(gt.Module):
    """Two linear layers with an optimizer each, and a layer that only rank 1's loss uses."""

    automatic_optimization = False

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.extra = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)
        self.how = how
        self.register_buffer("returned", torch.zeros(()))

    def loss(self, batch, rank):
        x, y = batch
        hidden = torch.tanh(self.a(x))
        out = self.b(hidden)
        if self.how == "a layer that one rank uses" and rank == 1:
            out = out + self.extra(hidden)
        return nn.functional.mse_loss(out, y)

    def training_step(self, batch, batch_idx):
        STEPS[self.how](
            self,
            self.optimizers(),
            lambda: self.loss(batch, self.trainer.global_rank),
            self.manual_backward,
            self.clip_gradients,
            batch_idx,
        )

    def configure_optimizers(self):
        if self.how == "a closure":
            return [
                torch.optim.LBFGS([*self.a.parameters(), *self.b.parameters()], lr=0.1, max_iter=4)
            ]
        return [
            torch.optim.SGD(self.a.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(
                [*self.b.parameters(), *self.extra.parameters(), *self.unused.parameters()],
                lr=0.01,
                weight_decay=0.1,
            ),
        ]


# --- bodies of training_step; loss() is the batch's mean, backward and clip are Lightning's ------


def only(module, optimizer):
    """Toggle optimizers by hand."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in own)


def toggled(module, optimizers, loss, backward, clip, batch_idx):
    for optimizer in optimizers:
        if module._run is None:
            only(module, optimizer)
        else:
            module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        backward(loss())
        optimizer.step()
        if module._run is None:
            module.requires_grad_(True)
        else:
            module.untoggle_optimizer(optimizer)


def not_toggled(module, optimizers, loss, backward, clip, batch_idx):
    for optimizer in optimizers:
        optimizer.zero_grad()
        backward(loss())
        optimizer.step()


def accumulating(module, optimizers, loss, backward, clip, batch_idx):
    backward(loss())
    backward(loss().square())
    if batch_idx % 3 == 2:
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)


def clipping(module, optimizers, loss, backward, clip, batch_idx):
    for optimizer in optimizers:
        optimizer.zero_grad()
        backward(loss())
        clip(optimizer, 0.05)
        optimizer.step()


def one_optimizer_often(module, optimizers, loss, backward, clip, batch_idx):
    a, b = optimizers
    for _ in range(1 + batch_idx % 3):
        a.zero_grad()
        backward(loss())
        a.step()
    b.zero_grad()
    graph = loss()
    backward(graph, retain_graph=True)
    backward(graph)
    b.step()


def with_closure(module, optimizers, loss, backward, clip, batch_idx):
    (optimizer,) = optimizers if isinstance(optimizers, list) else [optimizers]

    def closure():
        optimizer.zero_grad()
        now = loss()
        backward(now)
        return now

    module.returned.fill_(optimizer.step(closure).detach())


STEPS = {
    "toggled": toggled,
    "not toggled": not_toggled,
    "accumulating": accumulating,
    "clipping": clipping,
    "one optimizer often": one_optimizer_often,
    "a layer that one rank uses": not_toggled,
    "a closure": with_closure,
}


def by_hand(how, data, epochs=1):
    """Train in one process on whole batches with the mean of the ranks' losses, in plain torch."""
    module = Two(how)
    optimizers = module.configure_optimizers()

    def mean_loss(batch):
        # Ranks get the same samples as from the sampler.
        parts = [tuple(tensor[rank::RANKS] for tensor in batch) for rank in range(RANKS)]
        return lambda: sum(module.loss(part, rank) for rank, part in enumerate(parts)) / RANKS

    def clip(optimizer, limit):
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], limit
        )

    def backward(loss, **options):
        loss.backward(**options)

    for _ in range(epochs):
        for batch_idx, batch in enumerate(DataLoader(data, batch_size=8)):
            step = mean_loss(batch)
            if how == "accumulating":  # the mean of squares is not the square of the mean
                parts = [tuple(tensor[rank::RANKS] for tensor in batch) for rank in range(RANKS)]
                losses = iter([step, lambda parts=parts: _Root(module, parts)])
                STEPS[how](
                    module,
                    optimizers,
                    lambda losses=losses: next(losses)(),
                    backward,
                    clip,
                    batch_idx,
                )
            else:
                STEPS[how](module, optimizers, step, backward, clip, batch_idx)
    return copy.deepcopy(module.state_dict())


class _Root:
    """A value whose ``square()`` is the mean of the ranks' squares."""

    def __init__(self, module, parts):
        self.module, self.parts = module, parts

    def square(self):
        return (
            sum(self.module.loss(part, rank).square() for rank, part in enumerate(self.parts))
            / RANKS
        )


def on_ranks(how, trainer, data):
    module = Two(how)
    trainer.fit(module, DataLoader(data, batch_size=8 // RANKS))
    return {key: value.clone() for key, value in module.state_dict().items()}
