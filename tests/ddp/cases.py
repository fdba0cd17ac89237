"""Training cases that the tests run in one process and in several."""

import sys
from pathlib import Path

from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from regression import Curve, Net, one_trainer, samples, weights


def ddp(devices=2, **options):
    return one_trainer(strategy="ddp", devices=devices, **options)


#: By name: the module's arguments, the trainer's options, the strategy's options.
#: The kit's cases (tests/testing/test_conformance_ranks.py) train in the other ways.
CASES = {
    "adam": ({"optimizer": "adam"}, {"max_epochs": 2}, {}),
    "many buckets, accumulating": (
        {"optimizer": "adam"},
        {"accumulate_grad_batches": 2},
        {"bucket_cap_mb": 0.0001},
    ),
    "gradients as views": ({}, {"accumulate_grad_batches": 4}, {"gradient_as_bucket_view": True}),
    "static graph": ({}, {}, {"static_graph": True}),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, {}),
}


def train(name, ranks=1):
    """Train a case on global batches of 8 samples; return trainer, losses of steps and weights."""
    made, options, of_ddp = CASES[name]
    module, curve = Net(**made), Curve()
    if ranks > 1:
        options = {**options, "strategy": "ddp", "strategy_options": of_ddp}
    trainer = one_trainer(devices=ranks, plugins=[curve], **options)
    trainer.fit(module, DataLoader(samples(), batch_size=8 // ranks))
    return trainer, curve.values, weights(module)
