"""A language model of characters: a small transformer learns the help topics that ship inside every Python.

geartrain fit examples/char_lm.py --max-epochs 5 --seed 1 --output runs/chars --plugin throughput --throughput.tokens 64
geartrain predict examples/char_lm.py --checkpoint runs/chars/last.ckpt --seed 1 --output runs/said
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

#: A character's number is its place here; characters that are not here are read as "?".
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


def encode(text: str) -> torch.Tensor:
    """Characters as numbers ``[length]``."""
    return torch.tensor([ALPHABET.index(c if c in ALPHABET else "?") for c in text])


def decode(numbers: torch.Tensor) -> str:
    return "".join(ALPHABET[n] for n in numbers.tolist())


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each beside a residual: ``[batch, length, width]`` -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each of q, k and v: [batch, heads, length, width / heads].
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class CharLM(gt.Module):
    """Characters ``[batch, length]`` -> logits of the next one at each place, ``[batch, length, 96]``.

    Args:
        context: the most characters that a prediction looks back on.
        width: numbers that stand for one character inside the model.
        heads: heads of attention; they share ``width``.
        layers: blocks on top of each other.
        lr: AdamW's largest learning rate; it rises at the beginning and falls to the end.
    """

    def __init__(
        self, context: int = 64, width: int = 128, heads: int = 4, layers: int = 3, lr: float = 3e-3
    ) -> None:
        super().__init__()
        if width % heads:
            raise gt.UsageError(
                f"width={width} cannot be shared by {heads} heads. Fix: a multiple of {heads}"
            )
        self.context, self.lr = context, lr
        self.characters, self.places = (
            nn.Embedding(len(ALPHABET), width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)  # so that the first loss is that of a guess

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.blocks(self.characters(characters) + self.places(places)))

    def loss(self, batch) -> torch.Tensor:
        """Nats a character."""
        inputs, following = batch
        return functional.cross_entropy(self(inputs).flatten(0, 1), following.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bits_per_char", loss / math.log(2), prog_bar=True, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        texts = [self.sample(prompt) for prompt in batch]
        self.print(*texts, sep="\n---\n")
        return texts

    @torch.no_grad()
    def sample(self, prompt: str, length: int = 400, temperature: float = 0.7) -> str:
        """``prompt`` and what the model says next, character by character."""
        said = encode(prompt).to(self.device)
        for _ in range(length):
            logits = self(said[None, -self.context :])[0, -1]
            said = torch.cat([said, torch.multinomial((logits / temperature).softmax(0), 1)])
        return decode(said)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=steps, pct_start=0.1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Topics(gt.DataModule):
    """Each paragraph of the topics once, in their order; the last tenth of them to validate.

    Args:
        context: characters in one sample; not more than the model's.
        batch_size: samples in one batch of one process.
        prompt: what ``predict`` goes on from.
    """

    def __init__(self, context: int = 64, batch_size: int = 32, prompt: str = "The ") -> None:
        self.context, self.batch_size, self.prompt = context, batch_size, prompt

    def setup(self, stage: str) -> None:
        # Topics quote each other: without this the model would be validated on paragraphs that it was trained on.
        paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
        kept = len(paragraphs) * 9 // 10
        self.train, self.val = self.samples(paragraphs[:kept]), self.samples(paragraphs[kept:])

    def samples(self, paragraphs: list[str]) -> TensorDataset:
        """Pairs of ``[context]``: characters, and at each place the one that follows."""
        text = encode("\n\n".join(paragraphs))
        windows = text.unfold(0, self.context + 1, self.context)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)

    def predict_dataloader(self):
        return DataLoader([self.prompt])


if __name__ == "__main__":
    gt.cli(CharLM, Topics)
