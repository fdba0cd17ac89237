"""Third-party callbacks that import Lightning, unchanged. Each needs its package, and Lightning."""

import pytest
import torch
from small_models import EvalNet, loader, trainer

import geartrain as gt

pytest.importorskip("lightning.pytorch", reason="needs Lightning")


class Slow(EvalNet):
    """A model that learns nothing with ``lr=0``; its values are of all ranks."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    "strategy",
    ["single", pytest.param("ddp_spawn", marks=pytest.mark.end_to_end)],
)
def test_optuna_prunes_a_fit(tmp_path, strategy):
    optuna = pytest.importorskip("optuna")
    integration = pytest.importorskip("optuna_integration")
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", pruner=pruner)

    def objective(trial):
        torch.manual_seed(0)
        prune = integration.PyTorchLightningPruningCallback(trial, "val_loss")
        one = trainer(
            callbacks=[prune],
            max_epochs=3,
            num_sanity_val_steps=1,
            strategy=strategy,
            devices=1 if strategy == "single" else 2,
        )
        one.fit(Slow(trial.suggest_categorical("lr", [0.0, 0.1])), loader(), loader())
        prune.check_pruned()
        return one.callback_metrics["val_loss"].item()

    study.enqueue_trial({"lr": 0.1})
    study.enqueue_trial({"lr": 0.0})
    study.optimize(objective, n_trials=2)
    states = [(trial.state.name, len(trial.intermediate_values)) for trial in study.trials]
    assert states == [("COMPLETE", 3), ("PRUNED", 1)]


def test_a_callback_of_lightnings_own_class():
    """The real base class: only overridden methods are called."""
    from lightning.pytorch import Callback as Lightnings

    class Logs(Lightnings):
        def on_train_epoch_end(self, trainer, pl_module):
            self.log("mine", 1.0)

    callback = Logs()
    one = trainer(callbacks=[callback])
    one.fit(EvalNet(), loader())
    assert one.callback_metrics["mine"] == 1
    assert "log" not in vars(callback)


def test_lightnings_own_callbacks_name_ours():
    from lightning.pytorch.callbacks import EarlyStopping

    with pytest.raises(gt.UsageError, match=r"own\. Fix: use geartrain\.callbacks\.EarlyStopping"):
        trainer(callbacks=[EarlyStopping("val_loss")])
