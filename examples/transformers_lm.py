"""A model of Hugging Face transformers: a small GPT-2 with random weights, whose tokens are bytes.

Nothing is downloaded. With a Module around the model, and every option of the command line:

geartrain fit examples/transformers_lm.py --max-epochs 3 --seed 1 --output runs/gpt2

With the unchanged model, whose output has the loss:

python examples/transformers_lm.py --max-epochs 3 --save runs/gpt2-plain
python examples/transformers_lm.py --max-epochs 3 --strategy ddp --devices 2
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import geartrain as gt


def small_gpt2(width: int = 128, layers: int = 2) -> GPT2LMHeadModel:
    """Return a model that maps tokens ``[batch, length]`` below 256 to an output.

    The output has ``logits`` ``[batch, length, 256]`` and, if ``labels`` are passed, ``loss``.
    """
    own = {"bos_token_id": 0, "eos_token_id": 0}  # GPT-2's are above 256
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=128, n_embd=width, n_layer=layers, n_head=width // 32, **own
        )
    )


class Bytes(Dataset):
    """Pieces of a text, as dicts for a model of transformers.

    Each has ``input_ids`` and ``labels``, ``[length]``. The model itself compares each byte's
    logits with the next byte.
    """

    def __init__(self, text: str, length: int = 128) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.pieces = data[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index].long()
        return {"input_ids": piece, "labels": piece}


class HelpTopics(gt.DataModule):
    """Python's built-in help topics, each paragraph once; the last tenth is for validation.

    Args:
        batch_size: samples in one batch of one process.
    """

    def __init__(self, batch_size: int = 16) -> None:
        self.batch_size = batch_size
        paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
        kept = len(paragraphs) * 9 // 10
        self.train = Bytes("\n\n".join(paragraphs[:kept]))
        self.val = Bytes("\n\n".join(paragraphs[kept:]))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)


class LanguageModel(gt.Module):
    """A small GPT-2; it is saved to ``OUTPUT/model`` after training, for ``from_pretrained``.

    Args:
        width: the size of the vector of one byte; a multiple of 32.
        layers: the number of blocks.
        lr: AdamW's learning rate.
    """

    def __init__(self, width: int = 128, layers: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr, self.model = lr, small_gpt2(width, layers)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_fit_end(self):
        if self.global_rank == 0 and self.trainer.output is not None:
            self.model.save_pretrained(self.trainer.output / "model")


def main() -> None:
    """Train the unchanged model. ``loss`` is not passed, so the output's ``loss`` is used."""
    options = argparse.ArgumentParser(description="Train a small GPT-2 as a plain nn.Module.")
    options.add_argument("--max-epochs", type=int, default=1)
    options.add_argument("--max-steps", type=int, default=-1)
    options.add_argument("--strategy", default="auto")
    options.add_argument("--devices", type=int, default=1)
    options.add_argument("--save", type=Path, help="a folder for the trained model")
    chosen = vars(options.parse_args())
    save = chosen.pop("save")
    trainer = gt.Trainer(**chosen, seed=1)
    model = small_gpt2()
    trainer.fit(model, datamodule=HelpTopics(), optimizer=partial(torch.optim.AdamW, lr=1e-3))
    if save is not None and trainer.is_global_zero:
        model.save_pretrained(save)


if __name__ == "__main__":
    main()
