"""The algorithms of Bagua's papers and code in one process, the reference for results of ranks.

Nothing here is geartrain's code. A rank is a copy of the layer; communication is arithmetic on a
list.
"""

import copy

import torch
from torch import nn

from .upstream_program import LEARNING_RATE, QADAM, STEPS, loss_of, order, seeded


def quantised(chunk: torch.Tensor) -> torch.Tensor:
    """Return a chunk after it is encoded and decoded in 8 bits."""
    low, high = chunk.min(), chunk.max()
    scale = 255 / (high - low + 1e-7)
    upper = torch.round(high * scale)
    lower = upper - 255
    code = (torch.minimum(torch.round(chunk * scale), upper) - lower).to(torch.uint8)
    return (code.float() + lower) / scale


def in_chunks(flat: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([quantised(chunk) for chunk in flat.chunk(n)])


def mean(flats: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(flats).mean(0)


def eight_bit_mean(flats: list[torch.Tensor], hierarchical: bool) -> torch.Tensor:
    """Return the mean as bytegrad computes it.

    With ``hierarchical``, both ranks are on one node with one leader, whose group has one chunk.
    """
    if hierarchical:
        return quantised(quantised(mean(flats)))
    return in_chunks(mean([in_chunks(flat, len(flats)) for flat in flats]), len(flats))


class Ranks:
    """Copies of the layer, one per rank, each with its own samples."""

    def __init__(self, shards: list[list[int]]) -> None:
        layer, self.data = seeded()
        self.shards = shards
        self.layers = [copy.deepcopy(layer) for _ in shards]
        self.optimizers = [
            torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE) for layer in self.layers
        ]
        self.step = 0

    def backward(self, i: int) -> torch.Tensor:
        """Compute rank i's gradients of this step; return them in one flat tensor."""
        layer, sample = self.layers[i], self.shards[i][self.step]
        layer.zero_grad()
        loss_of(layer, self.data[sample : sample + 1]).backward()
        return torch.cat([parameter.grad.flatten() for parameter in self.parameters(i)])

    def parameters(self, i: int) -> list[nn.Parameter]:
        """Return the parameters in the order of a bucket: reversed."""
        return list(self.layers[i].parameters())[::-1]

    def weights(self, i: int) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters(i)])

    def give(self, i: int, flat: torch.Tensor, gradients: bool = False) -> None:
        lengths = [parameter.numel() for parameter in self.parameters(i)]
        for parameter, part in zip(self.parameters(i), flat.split(lengths), strict=True):
            (parameter.grad if gradients else parameter.data).copy_(part.view_as(parameter))

    def result(self) -> list[dict[str, torch.Tensor]]:
        return [layer.state_dict() for layer in self.layers]


def averaged_gradients(ranks: Ranks, combine) -> None:
    flats = [ranks.backward(i) for i in range(len(ranks.layers))]
    for i, optimizer in enumerate(ranks.optimizers):
        ranks.give(i, combine(flats), gradients=True)
        optimizer.step()


def gradient_allreduce(ranks: Ranks, average: bool = True, hierarchical: bool = False) -> None:
    for ranks.step in range(STEPS):
        averaged_gradients(ranks, lambda flats: mean(flats) * (1 if average else len(flats)))


def bytegrad(ranks: Ranks, hierarchical: bool = True) -> None:
    for ranks.step in range(STEPS):
        averaged_gradients(ranks, lambda flats: eight_bit_mean(flats, hierarchical))


def qadam(ranks: Ranks, hierarchical: bool = True) -> None:
    first, second, eps = 0.9, 0.999, 1e-8
    m = [torch.zeros_like(ranks.weights(i)) for i in range(len(ranks.layers))]
    v = torch.zeros_like(m[0])
    for ranks.step in range(STEPS):
        t = ranks.step + 1
        flats = [ranks.backward(i) for i in range(len(m))]
        if t < QADAM["warmup_steps"]:
            m = [first * old + (1 - first) * mean(flats) for old in m]
            v = second * v + (1 - second) * mean(flats) ** 2
        elif t > QADAM["warmup_steps"]:
            mine = [first * old + (1 - first) * flat for old, flat in zip(m, flats, strict=True)]
            m = [eight_bit_mean(mine, hierarchical)] * len(m)
        for i, momentum in enumerate(m):
            update = momentum / (v.sqrt() / (1 - second**t) ** 0.5 + eps)
            ranks.give(i, ranks.weights(i) - QADAM["lr"] / (1 - first**t) * update)


def decentralized(
    ranks: Ranks,
    peer_selection_mode: str = "all",
    communication_interval: int = 1,
    hierarchical: bool = False,
) -> None:
    """Average weights; with two ranks, "shift_one" equals "all"."""
    for ranks.step in range(STEPS):
        average = mean([ranks.weights(i) for i in range(len(ranks.layers))])
        for i, optimizer in enumerate(ranks.optimizers):
            ranks.backward(i)
            if ranks.step % communication_interval == 0:
                ranks.give(i, average)
            optimizer.step()


def low_precision_decentralized(ranks: Ranks, hierarchical: bool = False) -> None:
    n = len(ranks.layers)
    own = [ranks.weights(i) for i in range(n)]
    left, right = [flat.clone() for flat in own], [flat.clone() for flat in own]
    for ranks.step in range(STEPS):
        sent = []
        for i, optimizer in enumerate(ranks.optimizers):
            ranks.backward(i)
            optimizer.step()
            # In Bagua's order: in another order, some elements would round to other bytes.
            change = torch.add(ranks.weights(i), left[i], alpha=1 / 3)
            change = torch.add(change, right[i], alpha=1 / 3)
            sent.append(quantised(torch.sub(change, own[i], alpha=5 / 3)))
        for i in range(n):
            left[i] = left[i] + sent[(i - 1) % n]
            right[i] = right[i] + sent[(i + 1) % n]
            own[i] = own[i] + sent[i]
            ranks.give(i, own[i])


ALGORITHMS = {
    "gradient_allreduce": gradient_allreduce,
    "bytegrad": bytegrad,
    "qadam": qadam,
    "decentralized": decentralized,
    "low_precision_decentralized": low_precision_decentralized,
}


def trained(
    algorithm: str, options: dict[str, object], sharded: bool
) -> list[dict[str, torch.Tensor]]:
    """Return each rank's weights after an epoch of two ranks."""
    ranks = Ranks([order()[i if sharded else 0 :: 2] for i in range(2)])
    ALGORITHMS[algorithm](ranks, **options)
    return ranks.result()
