"""The algorithms that exchange weights, as plain loops over ranks in one process.

The only code of the plugin here is the plain form of MinMaxUInt8, which other tests compare with
the formula.
"""

import torch
from torch import nn

from geartrain_bagua.minmax_uint8 import decode_plain, encode_plain


class Net(nn.Module):
    """Bagua's test net, without a bias in the first and the last layer."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2, 10, bias=False), nn.Linear(10, 50)
        self.fc3 = nn.Linear(50, 4, bias=False)

    def forward(self, x):
        return torch.softmax(self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))), dim=1)


def data(rank, step, micro=0):
    """Return a batch of 4 samples for this rank, step and micro-batch only."""
    random = torch.Generator().manual_seed(10_000 * rank + 100 * step + micro)
    return torch.randn(4, 2, generator=random), torch.randn(4, 4, generator=random)


def net():
    torch.manual_seed(3)
    return Net()


def optimizers(module, kind="sgd"):
    """Return one optimizer, with or without momentum, or two that share the parameters."""
    if kind == "two":
        first, *others = module.parameters()
        return [torch.optim.SGD([first], 0.1, momentum=0.9), torch.optim.Adam(others, 0.01)]
    return [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9 if kind == "momentum" else 0.0)]


def backward(module, rank, step, micros=1, clip=None):
    module.zero_grad()
    for micro in range(micros):
        x, y = data(rank, step, micro)
        (nn.functional.mse_loss(module(x), y) / micros).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(module.parameters(), clip)


def flat(module):
    """Return the weights in the order of a bucket: from the last parameter to the first."""
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in reversed(list(module.parameters()))]
    )


def put(module, weights):
    with torch.no_grad():
        for parameter in reversed(list(module.parameters())):
            own, weights = weights[: parameter.numel()], weights[parameter.numel() :]
            parameter.copy_(own.view_as(parameter))


def peer(rank, ranks, exchange):
    """Return the partner by Bagua's rule, copied literally."""
    if rank < ranks // 2:
        return ((exchange + rank) % ((ranks + 1) // 2)) + ranks // 2
    return (rank - ranks // 2 - exchange) % (ranks // 2)


def mean(several):
    return torch.stack(several).sum(0) / len(several)


def start(ranks, kind):
    modules = [net() for _ in range(ranks)]
    return modules, [optimizers(module, kind) for module in modules]


def decentralized(ranks, steps, mode="all", interval=1, node=None, kind="sgd", micros=1, clip=None):
    """Return each rank's weights after each step, ``[steps][ranks]``.

    Args:
        node: ranks per node, if hierarchical.
    """
    modules, optims = start(ranks, kind)
    history, members = [], node or 1
    for step in range(steps):
        before = [flat(module) for module in modules]
        parties = [mean(before[first : first + members]) for first in range(0, ranks, members)]
        for rank, module in enumerate(modules):
            backward(module, rank, step, micros, clip)  # with gradients of the rank's own weights
            if step % interval == 0:
                one, others = rank // members, parties
                if mode != "all":
                    others = [parties[one], parties[peer(one, len(parties), step // interval)]]
                put(module, mean(others))
            for optimizer in optims[rank]:
                optimizer.step()
        history.append([flat(module) for module in modules])
    return history


def quantised(difference):
    return decode_plain(*encode_plain(difference.view(1, -1))).view(-1)


def low_precision(ranks, steps, lengths, interval=1, node=None, kind="sgd"):
    """Return each rank's weights after each step, and the replicas at the end.

    The replicas are ``{"own", "left", "right"}`` for each party, with concatenated buckets.

    Args:
        lengths: elements of each bucket.
        node: ranks per node, if hierarchical.
    """
    modules, optims = start(ranks, kind)
    members = node or 1
    parties = ranks // members
    own, left, right = (
        [list(flat(modules[0]).split(lengths)) for _ in range(parties)] for _ in range(3)
    )
    history = []
    for step in range(steps):
        for rank, module in enumerate(modules):
            backward(module, rank, step)
            for optimizer in optims[rank]:
                optimizer.step()
        if step % interval == 0:
            for bucket in range(len(lengths)):
                xs = [flat(module).split(lengths)[bucket] for module in modules]
                xs = [mean(xs[first : first + members]) for first in range(0, ranks, members)]
                changes = []
                for party, x in enumerate(xs):
                    x = torch.add(x, left[party][bucket], alpha=1 / 3)
                    x = torch.add(x, right[party][bucket], alpha=1 / 3)
                    changes.append(quantised(torch.sub(x, own[party][bucket], alpha=5 / 3)))
                for party in range(parties):
                    own[party][bucket] = own[party][bucket] + changes[party]
                    left[party][bucket] = left[party][bucket] + changes[(party - 1) % parties]
                    right[party][bucket] = right[party][bucket] + changes[(party + 1) % parties]
            for rank, module in enumerate(modules):
                put(module, torch.cat(own[rank // members]))
        history.append([flat(module) for module in modules])
    replicas = [
        {"own": torch.cat(own[i]), "left": torch.cat(left[i]), "right": torch.cat(right[i])}
        for i in range(parties)
    ]
    return history, replicas


def averaged_gradients(ranks, steps, kind="sgd"):
    """Return the weights after each step of data-parallel training, the same on every rank."""
    module = net()
    optims = optimizers(module, kind)
    history = []
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            backward(module, rank, step)
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])
        for parameter, *several in zip(module.parameters(), *gradients, strict=True):
            parameter.grad.copy_(mean(several))
        for optimizer in optims:
            optimizer.step()
        history.append(flat(module))
    return history
