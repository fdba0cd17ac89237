"""A W&B sweep: its agent calls train() with the values of each run.

wandb login && python examples/wandb_sweep.py --count 20
python examples/wandb_sweep.py --offline --count 2

A sweep needs W&B's server, which chooses the values. With --offline this file chooses them from the
same configuration, at random, and each run stays on this machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import wandb
from digits import Digits, DigitsData

import geartrain as gt
from geartrain.loggers import WandB

SWEEP = {
    "method": "bayes",
    "metric": {"name": "val_acc", "goal": "maximize"},
    "parameters": {
        "hidden": {"values": [16, 32, 64, 128]},
        "lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
    },
}


def train(options: argparse.Namespace, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train with the values of a sweep, which reach every rank with the module.

    The plugin wandb logs to the run that is open in this process. The ranks of ddp_spawn are other
    processes: then only the last metrics are logged.
    """
    mode = "offline" if options.offline else "online"
    with wandb.init(project="digits", config=values, mode=mode) as run:
        model = Digits(hidden=run.config.hidden, lr=run.config.lr)
        trainer = gt.Trainer(
            accelerator="cpu",
            strategy=options.strategy,
            devices=options.devices,
            max_epochs=options.epochs,
            plugins=[WandB()] if options.strategy == "single" else [],
            enable_progress_bar=False,
            seed=1,
        )
        trainer.fit(model, datamodule=DigitsData())
        run.log({"val_acc": trainer.callback_metrics["val_acc"]})
        values = {name: run.config[name] for name in SWEEP["parameters"]}
        return {**values, "val_acc": float(trainer.callback_metrics["val_acc"])}


def draw(parameters: Mapping[str, Any], source: random.Random) -> dict[str, Any]:
    """Draw the values of a run, as a sweep of the method random does."""
    return {
        name: source.choice(how["values"])
        if "values" in how
        else how["min"] * (how["max"] / how["min"]) ** source.random()
        for name, how in parameters.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Run the agent of a new sweep; with --offline, without a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", default="single", help="single or ddp_spawn")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args(argv)
    if not options.offline:
        sweep = wandb.sweep(SWEEP, project="digits")
        wandb.agent(sweep, partial(train, options), count=options.count)
        return
    source = random.Random(1)
    for _ in range(options.count):
        print(train(options, draw(SWEEP["parameters"], source)))


if __name__ == "__main__":
    main()
