"""QAdam: Adam in the warm-up; then a constant variance, and a momentum that is sent in 8 bits."""

import re

import pytest
import torch
from several_ranks import kept_by
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_bagua import QAdamOptimizer
from geartrain_bagua.buckets import make_buckets

from .cases import Net, bagua, samples


def upstreams_net():
    torch.manual_seed(13)
    net = nn.Sequential(
        nn.Linear(2, 10, bias=False),
        nn.ReLU(),
        nn.Linear(10, 50),
        nn.ReLU(),
        nn.Linear(50, 4, bias=False),
        nn.Softmax(1),
    )
    return net, torch.randn(4, 2), torch.randn(4, 4)


def trained(make, steps):
    net, x, y = upstreams_net()
    optimizer, losses = make(net.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_equals_adam_in_the_warm_up():
    mine = trained(lambda p: QAdamOptimizer(p, lr=0.001, weight_decay=0.1, warmup_steps=2000), 1000)
    theirs = trained(lambda p: torch.optim.Adam(p, lr=0.001, weight_decay=0.1, foreach=False), 1000)
    assert mine == theirs


def by_hand(weights, gradients, warmup, lr=0.1, first=0.9, second=0.99, eps=1e-8, decay=0.1):
    """Apply the formulas to one tensor."""
    m = v = torch.zeros_like(weights)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + decay * weights
        if t != warmup:
            m = first * m + (1 - first) * g
        if t < warmup:
            v = second * v + (1 - second) * g * g
        weights = weights - lr / (1 - first**t) * m / (v.sqrt() / (1 - second**t) ** 0.5 + eps)
    return weights


@pytest.mark.parametrize("warmup", [2, 3, 20])
def test_every_step_equals_the_formulas_during_and_after_the_warm_up(warmup):
    start, gradients = torch.randn(7), [torch.randn(7) for _ in range(8)]
    parameter = nn.Parameter(start.clone())
    optimizer = QAdamOptimizer(
        [parameter], lr=0.1, warmup_steps=warmup, betas=(0.9, 0.99), weight_decay=0.1
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, gradient)
    torch.testing.assert_close(parameter.detach(), by_hand(start, gradients, warmup))


def test_a_new_optimizer_resumes_from_the_state_dict():
    start, gradients = torch.randn(7), [torch.randn(7) for _ in range(8)]
    parameter, state = nn.Parameter(start.clone()), None
    for gradient in gradients:  # a new optimizer in each step
        optimizer = QAdamOptimizer(
            [parameter], lr=0.1, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.1
        )
        if state is not None:
            optimizer.load_state_dict(state)
        parameter.grad = gradient.clone()
        optimizer.step()
        state = optimizer.state_dict()
    assert state["param_groups"][0]["step"] == 8
    torch.testing.assert_close(parameter.detach(), by_hand(start, gradients, 3))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_warmup_steps_must_be_above_0(wrong):
    with pytest.raises(gt.UsageError, match="warmup_steps"):
        QAdamOptimizer([nn.Parameter(torch.zeros(1))], warmup_steps=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.5, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1.0},
        {"weight_decay": -0.1},
    ],
    ids=str,
)
def test_values_that_adam_refuses_are_refused_with_its_text(wrong):
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="Invalid") as of_adam:
        torch.optim.Adam(parameters, **wrong)
    text = re.escape(str(of_adam.value))
    with pytest.raises(gt.UsageError, match=f"QAdamOptimizer: {text}. Fix: "):
        QAdamOptimizer(parameters, **wrong)


# --- with the algorithm ---------------------------------------------------------------------------


class Q(Net):
    def configure_optimizers(self):
        others = [*self.second.parameters(), *self.extra.parameters(), *self.last.parameters()]
        groups = [
            {"params": [*self.first.parameters()], "betas": (0.8, 0.99), "weight_decay": 0.1},
            {"params": others},
        ]
        warmup_steps = 4 if self.trainer.plan.options.accumulate_grad_batches == 1 else 2
        self.made = QAdamOptimizer(groups, lr=0.01, warmup_steps=warmup_steps)
        return self.made


def train_past_the_warm_up():
    found = {}
    for name, options in {"flat": {}, "accumulating": {"accumulate_grad_batches": 3}}.items():
        module = Q()
        strategy = {"algorithm": "qadam", "bucket_bytes": 300, "hierarchical": False}
        bagua(strategy=strategy, max_epochs=2, **options).fit(module, DataLoader(samples(), 4))
        found[name] = {key: value.clone() for key, value in module.state_dict().items()}
        found["mixed", name] = module.made.momentum_is_mixed
        found["momentum", name] = torch.cat(
            [module.made.state[p]["exp_avg"].flatten() for p in module.parameters()]
        )
    return found


two_ranks = kept_by(train_past_the_warm_up)


def in_a_byte(chunk):
    """Encode and decode a chunk in MinMaxUInt8."""
    scale = 255 / (chunk.max() - chunk.min() + 1e-7)
    upper = (chunk.max() * scale).round()
    codes = (torch.minimum((chunk * scale).round(), upper) - (upper - 255)).to(torch.uint8)
    return (codes.float() + (upper - 255)) / scale


def mean_in_bytes(momenta):
    """Return the mean of both ranks' bucket, of which each rank averages one half."""
    padded = [nn.functional.pad(flat, (0, len(flat) % 2)).view(2, -1) for flat in momenta]
    halves = zip(*padded, strict=True)
    means = [in_a_byte((in_a_byte(one) + in_a_byte(other)) / 2) for one, other in halves]
    return torch.cat(means)[: len(momenta[0])]


def two_ranks_by_hand(window, steps, warmup, lr=0.01):
    """Train two ranks in one process with the formulas; return the weights.

    Only the assignment of parameters to buckets is the plugin's.
    """
    net, (x, y) = Net(), samples().tensors
    named = list(net.named_parameters())
    parameters = [p for _, p in named]
    own = [(0.8, 0.99, 0.1) if name.startswith("first") else (0.9, 0.999, 0.0) for name, _ in named]
    m, v = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    number = {p: i for i, p in enumerate(parameters)}
    buckets = [
        [number[p] for p in bucket.parameters] for bucket in make_buckets(parameters, 2, 300)
    ]
    for t in range(1, steps + 1):
        of_rank = []
        for rank in range(2):
            gradients = [torch.zeros_like(p) for p in parameters]
            for micro in range(window):
                # Each rank has 24 samples, every second one of all.
                start = 4 * ((t - 1) * window + micro) % 24
                rows = [2 * i + rank for i in range(start, start + 4)]
                loss = nn.functional.mse_loss(net(x[rows]), y[rows])
                gradients = [
                    a + b / window
                    for a, b in zip(gradients, torch.autograd.grad(loss, parameters), strict=True)
                ]
            of_rank.append(
                [
                    g + d * p.detach()
                    for g, p, (_, _, d) in zip(gradients, parameters, own, strict=True)
                ]
            )
        if t < warmup:
            for i, (b1, b2, _) in enumerate(own):
                mean = (of_rank[0][i] + of_rank[1][i]) / 2
                m[i], v[i] = b1 * m[i] + (1 - b1) * mean, b2 * v[i] + (1 - b2) * mean * mean
        elif t > warmup:
            mixed = [
                [b1 * m[i] + (1 - b1) * gradients[i] for i, (b1, _, _) in enumerate(own)]
                for gradients in of_rank
            ]
            for bucket in buckets:
                mean = mean_in_bytes(
                    [torch.cat([one[i].flatten() for i in bucket]) for one in mixed]
                )
                for i, part in zip(bucket, mean.split([m[i].numel() for i in bucket]), strict=True):
                    m[i] = part.view(m[i].shape)
        with torch.no_grad():
            for p, one, two, (b1, b2, _) in zip(parameters, m, v, own, strict=True):
                p -= lr / (1 - b1**t) * one / (two.sqrt() / (1 - b2**t) ** 0.5 + 1e-8)
    return net.state_dict()


@pytest.mark.parametrize(
    ("name", "window", "steps", "warmup"), [("flat", 1, 12, 4), ("accumulating", 3, 4, 2)]
)
def test_two_ranks_train_as_the_formulas(two_ranks, name, window, steps, warmup):
    first, second = two_ranks
    begin = Net().state_dict()
    for key, expected in two_ranks_by_hand(window, steps, warmup).items():
        assert torch.equal(first[name][key], second[name][key]), key
        # If a sum has another order, a momentum may round to the next byte.
        assert (first[name][key] - expected).norm() <= 1e-3 * (expected - begin[key]).norm(), key
    momenta = [kept["momentum", name] for kept in two_ranks]
    assert torch.equal(*momenta)
    assert not first["mixed", name]


# --- errors ---------------------------------------------------------------------------------------


def make(parameters):
    return QAdamOptimizer(parameters, lr=0.01)


def scheduled(optimizer, n):
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(n)]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            lambda p: torch.optim.Adam(p),
            "exactly one optimizer, a QAdamOptimizer, but configure_optimizers returned Adam",
        ),
        (
            lambda p: [make(p[:2]), make(p[2:])],
            "configure_optimizers returned QAdamOptimizer, QAdamOptimizer",
        ),
        (lambda p: None, "returned none"),
        (lambda p: scheduled(make(p), 2), "one scheduler at most, .* returned 2"),
    ],
    ids=["adam", "two", "none", "two schedulers"],
)
@pytest.mark.filterwarnings("ignore:configure_optimizers returned None")
def test_other_optimizers_and_two_schedulers_are_refused(returns, message):
    class Module(Net):
        def configure_optimizers(self):
            return returns([*self.parameters()])

    with pytest.raises(gt.UsageError, match=message):
        bagua(1, strategy={"algorithm": "qadam"}).fit(Module(), DataLoader(samples(), 8))


def test_one_scheduler_is_accepted():
    class Module(Net):
        def configure_optimizers(self):
            return scheduled(make(self.parameters()), 1)

    bagua(1, strategy={"algorithm": "qadam"}).fit(Module(), DataLoader(samples(), 8))


@pytest.mark.parametrize(
    ("options", "change"),
    [({"precision": "16-mixed"}, "unscaled"), ({"gradient_clip_val": 1.0}, "clipped")],
)
def test_unscaling_and_clipping_the_momentum_is_refused_before_the_start(options, change):
    message = rf"geartrain-bagua\[bagua\]: the algorithm 'qadam'.*before they are {change}"
    with pytest.raises(gt.UsageError, match=message):
        bagua(2, strategy={"algorithm": "qadam"}, **options).fit(Net(), DataLoader(samples(), 8))
