"""Optuna looks for the size and learning rate of the digits' network, and prunes bad trials.

python examples/optuna_search.py --trials 20
python examples/optuna_search.py --trials 20 --strategy ddp_spawn --devices 2
"""

from __future__ import annotations

import argparse

import optuna
from digits import Digits, DigitsData

import geartrain as gt
from geartrain.callbacks import Callback


class Prune(Callback):
    """Report the metric of each epoch to a trial, and end the training of a pruned one.

    Rank 0 alone knows the trial: under ddp_spawn the others run in processes of their own. Its
    decision reaches every rank, so that all of them end in the same epoch.
    """

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        pruned = False
        if trainer.is_global_zero:
            value = float(trainer.callback_metrics[self.monitor])
            self.trial.report(value, step=trainer.current_epoch)
            pruned = self.trial.should_prune()
        pruned = trainer.strategy.broadcast(pruned)
        self.log("pruned", float(pruned))  # metrics come back from the ranks, this object does not
        if pruned:
            trainer.should_stop = True


def objective(trial: optuna.Trial, options: argparse.Namespace) -> float:
    """Train one network; return its accuracy."""
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[Prune(trial, "val_acc")],
        enable_progress_bar=False,
        seed=1,  # also of the module's weights, which are drawn after this
    )
    model = Digits(
        hidden=trial.suggest_int("hidden", 8, 128, log=True),
        lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True),
    )
    trainer.fit(model, datamodule=DigitsData())
    if trainer.callback_metrics["pruned"]:
        raise optuna.TrialPruned
    return float(trainer.callback_metrics["val_acc"])


def main(argv: list[str] | None = None) -> optuna.Study:
    """Search with the options of the command line, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", default="single", help="single or ddp_spawn")
    parser.add_argument("--devices", type=int, default=1)
    # A file, because the ranks of ddp_spawn get a copy of the trial.
    parser.add_argument("--storage", default="sqlite:///optuna.db")
    options = parser.parse_args(argv)
    study = optuna.create_study(
        storage=options.storage,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1),
    )
    study.optimize(lambda trial: objective(trial, options), n_trials=options.trials)
    best = study.best_trial
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(f"best of {len(study.trials)}, {pruned} pruned: val_acc {best.value:.3f}, {best.params}")
    return study


if __name__ == "__main__":
    main()
