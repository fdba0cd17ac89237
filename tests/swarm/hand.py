"""A training loop in plain torch, whose weights are compared with those of geartrain."""

from collections import defaultdict
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from .program import Draw, Model


def train(draw: Draw, batches: dict[str, Any]) -> dict[str, Any]:
    """Train on the batches, whose keys are ``"EPOCH BATCH"``, and return the weights."""
    model = Model(asdict(draw))
    if draw.precision == "64-true":
        model = model.double()
    epochs: dict[int, list[Any]] = defaultdict(list)
    for key, batch in batches.items():
        epochs[int(key.split(" ")[0])].append(batch)
    made = model.configure_optimizers()
    optimizers, schedules = made if isinstance(made, tuple) else (made, [])
    schedulers = [schedule["scheduler"] for schedule in schedules]
    manual = draw.optimisation == "manual"
    clipped = [list(model.parameters())] if draw.clip else []
    if "fit.Module.configure_gradient_clipping" in draw.implied:  # of each optimizer
        clipped = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    steps = 0
    for epoch in epochs.values():
        total, count, left = 0.0, 0, iter(epoch)
        while window := list(islice(left, draw.accumulate)):

            def gradients(window: list[Any] = window) -> Any:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for batch in window:
                    loss = model.loss(batch) / len(window)
                    loss.backward()
                for parameters in clipped if not manual else ():
                    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                return loss.detach()

            steps += 1
            with torch.no_grad():
                losses = [(float(model.loss(batch)), len(pools_size(batch))) for batch in window]
            total += sum(loss * size for loss, size in losses)
            count += sum(size for _, size in losses)
            for optimizer in optimizers:
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(gradients)
                else:
                    if optimizer is optimizers[0]:
                        gradients()
                    optimizer.step()
            if manual or draw.interval == "step":
                for scheduler in schedulers:
                    step(scheduler, losses[-1][0])
        if not manual and draw.interval == "epoch":
            validated = validate(model) if draw.validation != "none" else total / count
            for scheduler in schedulers:
                step(scheduler, validated)
    return {"weights": model.state_dict(), "after": [steps, len(epochs)]}


def pools_size(batch: Any) -> torch.Tensor:
    from .program import pairs

    return pairs(batch)[0]


def step(scheduler: Any, metric: float) -> None:
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([metric] if plateau else []))


def validate(model: Model) -> float:
    loader = model.val_dataloader()
    with torch.no_grad():
        sizes = [(float(model.loss(batch)), len(batch[0])) for batch in loader]
    return sum(loss * size for loss, size in sizes) / sum(size for _, size in sizes)
