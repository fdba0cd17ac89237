"""Training loops that the tests run in one process in plain torch, and on ranks with a Session."""

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import geartrain as gt

from .cases import Net, samples, weights

#: By name: the net's arguments, the session's options, micro-batches per step.
CASES = {
    "sgd": ({}, {}, 1),
    "adam": ({"optimizer": "adam"}, {}, 1),
    "accumulating": ({"optimizer": "adam"}, {}, 2),
    "many buckets, accumulating": ({}, {"strategy_options": {"bucket_cap_mb": 0.0001}}, 2),
    "clipped": ({}, {"gradient_clip_val": 0.05}, 1),
    "clipped by hand": ({}, {}, 1),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, 1),
    "with a scaler": ({}, {"precision": "16-mixed"}, 1),
}
#: Factors of the loss, so that gradients do not overflow float16 at the scaler's first scale.
GENTLE = {"with a scaler": 0.01}


def by_hand(name):
    """Train on whole batches in plain torch and return the weights."""
    made, _, window = CASES[name]
    scale = GENTLE.get(name, 1)
    net, clip = Net(**made), 0.05 if name.startswith("clipped") else None
    optimizer = net.configure_optimizers()
    for i, (x, y) in enumerate(DataLoader(samples(), 8), start=1):

        def closure(x=x, y=y):
            if name == "lbfgs":
                optimizer.zero_grad()
            loss = functional.mse_loss(net(x), y) / window * scale
            loss.backward()
            return loss

        if name == "lbfgs":
            optimizer.step(closure)
            continue
        closure()
        if i % window == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def with_session(name, **options):
    """Train on each rank's part of the same batches and return the weights."""
    more = CASES[name][1]
    with gt.Session(accelerator="cpu", devices=2, strategy="ddp", **more, **options) as session:
        session.launch()
        return loop(session, name)


def loop(session, name):
    """Run the loop of a case and return the weights."""
    made, _, window = CASES[name]
    net, scale = Net(**made), GENTLE.get(name, 1)
    if session.global_rank:
        net.first.reset_parameters()  # ranks start with different weights
    model, optimizer = session.setup(net, net.configure_optimizers())
    for i, (x, y) in enumerate(session.setup_dataloaders(DataLoader(samples(), 4)), start=1):

        def closure(x=x, y=y):
            if name == "lbfgs":
                optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y) / window * scale
            session.backward(loss)
            return loss

        if name == "lbfgs":
            optimizer.step(closure)
            continue
        with session.no_backward_sync(model, enabled=i % window != 0):
            closure()
        if i % window == 0:
            if name == "clipped by hand":
                session.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)
