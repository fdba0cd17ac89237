"""Hydra composes the configuration of a run: module, data and trainer.

python examples/hydra_app.py trainer.max_epochs=20 model.hidden=256
python examples/hydra_app.py --multirun model.lr=1e-3,1e-2
python examples/hydra_app.py trainer.strategy=ddp_spawn trainer.devices=2

ddp runs the script again for each rank, and Hydra would make a folder for each: use ddp_spawn.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

import geartrain as gt


@hydra.main(version_base=None, config_path="conf", config_name="digits")
def main(config: DictConfig) -> float:
    """Train; return the metric for Hydra's sweepers."""
    model, data = hydra.utils.instantiate(config.model), hydra.utils.instantiate(config.data)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = gt.Trainer(**config.trainer, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    return float(trainer.callback_metrics["val_acc"])


if __name__ == "__main__":
    main()
