"""What has no counterpart: geartrain port must name each of these lines, and leave it as it is."""

# ruff: noqa
# fmt: off

import pytorch_lightning as pl
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LearningRateFinder, Timer
from pytorch_lightning.utilities import rank_zero_only

parser = Trainer.add_argparse_args(None)


class Net(pl.LightningModule):
    def training_step(self, batch, batch_idx, optimizer_idx):
        self.log("loss", batch.sum(), enable_graph=True)
        self.logger.experiment.add_scalar("loss", 1)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer, optimizer_idx):
        optimizer.zero_grad(set_to_none=True)


class Data(pl.LightningDataModule):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class Says(pl.Callback):
    def on_epoch_end(self, trainer, pl_module):
        print(trainer.log_dir)
        print(pl_module.trainer.fit_loop.epoch_loop.batch_idx)
        pl_module.logger.log_metrics({})


trainer = Trainer(
    gpus=args.gpus,
    tpu_cores=8,
    strategy="deepspeed_stage_2_offload",
    precision="16-true",
    barebones=True,
    logger=True,
    truncated_bptt_steps=2,
    resume_from_checkpoint="last.ckpt",
    invented=1,
    **options,
)
trainer.tune(net)
pl.utilities.model_summary.summarize(net)
Net.load_from_checkpoint("last.ckpt")
