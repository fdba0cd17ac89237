"""Train examples/digits.py with each algorithm on two ranks; rank 0 prints a line for each.

Usage: ``python digits.py ROOT ALGORITHM...``
"""

import sys
import time

import torch

import geartrain as gt
from geartrain.strategies import BaguaStrategy, QAdamOptimizer

sys.path.insert(0, sys.argv[1])
from examples.digits import Digits, DigitsData

#: Options of algorithms whose defaults are for longer runs or for several nodes. On one node, the
#: hierarchical default would average in full.
OPTIONS = {
    "async": {"sync_interval_ms": 50},
    **{
        name: {"hierarchical": False}
        for name in ("bytegrad", "qadam", "decentralized", "low_precision_decentralized")
    },
}
#: Other algorithms are far above 0.97 after 15 epochs.
EPOCHS = dict.fromkeys(("gradient_allreduce", "qadam", "async", "power_sgd"), 20)


class QDigits(Digits):
    """The model with QAdam: a quarter of the steps is warm-up.

    Weights without a gradient in the warm-up have a variance of 0; a larger ``eps`` limits their
    steps.
    """

    def configure_optimizers(self):
        return QAdamOptimizer(self.parameters(), lr=self.lr, warmup_steps=60, eps=1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads of two ranks would only compete for the cores
    for algorithm in sys.argv[2:]:
        module = QDigits() if algorithm == "qadam" else Digits()
        strategy = BaguaStrategy(algorithm=algorithm, **OPTIONS.get(algorithm, {}))
        epochs = EPOCHS.get(algorithm, 15)
        trainer = gt.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            seed=1,
            enable_progress_bar=False,
        )
        since = time.perf_counter()
        trainer.fit(module, datamodule=DigitsData())
        if trainer.is_global_zero:
            print(
                algorithm,
                float(trainer.callback_metrics["val_acc"]),
                f"{time.perf_counter() - since:.1f}",
                flush=True,
            )
