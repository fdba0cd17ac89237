"""Trainings that the tests run in one process and in several."""

from regression import Curve, Net, one_trainer, samples, weights
from torch.utils.data import DataLoader


def bagua(devices=2, strategy=None, **options):
    return one_trainer(
        strategy="bagua", strategy_options=strategy or {}, devices=devices, **options
    )


#: name -> (the module's options, the trainer's options, the strategy's options). The kit's cases
#: (tests/testing/test_conformance_ranks.py) train in the other ways.
CASES = {
    "sgd": ({}, {}, {}),
    "hundreds of buckets": ({"deep": 150}, {"max_steps": 3}, {"bucket_bytes": 4}),
    "frozen later": ({"freezes": True}, {}, {}),
    "shared": ({"shared": True, "optimizer": "adam"}, {}, {"bucket_bytes": 100}),
    "unused": (
        {"unused": True, "optimizer": "adam"},
        {},
        {"find_unused_parameters": True, "bucket_bytes": 100},
    ),
    # Unused in the last micro-batch only: the gradients are those of the others.
    "unused, accumulating": (
        {"unused": True},
        {"accumulate_grad_batches": 2},
        {"bucket_bytes": 100},
    ),
    "clipped by value": (
        {},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"bucket_bytes": 100},
    ),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, {"bucket_bytes": 100}),
    "64-true": ({}, {"precision": "64-true"}, {}),
}


def train(name, ranks=1):
    """Train a case on global batches of 8 samples; return the trainer, losses and weights."""
    made, options, of_bagua = CASES[name]
    module, curve = Net(**made), Curve()
    if ranks > 1:
        options = {**options, "strategy": "bagua", "strategy_options": of_bagua}
    trainer = one_trainer(devices=ranks, plugins=[curve], **options)
    trainer.fit(module, DataLoader(samples(), batch_size=8 // ranks))
    return trainer, curve.values, weights(module)
