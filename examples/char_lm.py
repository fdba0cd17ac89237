r"""A language model of characters: a small transformer learns Python's built-in help topics.

geartrain fit examples/char_lm.py --max-epochs 5 --seed 1 --output runs/chars \
    --plugin throughput --throughput.tokens 64
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

#: A character's number is its index here; other characters are read as "?".
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


def encode(text: str) -> torch.Tensor:
    """Return characters as numbers ``[length]``."""
    return torch.tensor([ALPHABET.index(c if c in ALPHABET else "?") for c in text])


def decode(numbers: torch.Tensor) -> str:
    """Return numbers ``[length]`` as characters."""
    return "".join(ALPHABET[n] for n in numbers.tolist())


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection.

    Input and output are ``[batch, length, width]``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
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
    """Maps characters ``[batch, length]`` to logits of the next character.

    The logits are ``[batch, length, 96]``.

    Args:
        context: the largest number of characters before a prediction.
        width: the size of the vector of one character.
        heads: attention heads; they share ``width``.
        layers: the number of blocks.
        lr: AdamW's largest learning rate; it rises at the start and then falls to the end.
    """

    def __init__(
        self, context: int = 64, width: int = 128, heads: int = 4, layers: int = 3, lr: float = 3e-3
    ) -> None:
        super().__init__()
        if width % heads:
            raise gt.UsageError(
                f"width={width} cannot be shared by {heads} heads. Fix: use a multiple of {heads}"
            )
        self.context, self.lr = context, lr
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)  # the first loss is that of a random guess

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.blocks(self.characters(characters) + self.places(places)))

    def loss(self, batch) -> torch.Tensor:
        """Return the cross-entropy in nats per character."""
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
        """Return ``prompt`` and the characters that the model adds to it."""
        text = encode(prompt).to(self.device)
        for _ in range(length):
            logits = self(text[None, -self.context :])[0, -1]
            text = torch.cat([text, torch.multinomial((logits / temperature).softmax(0), 1)])
        return decode(text)

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
    """Each paragraph of the topics once, in order; the last tenth is for validation.

    Args:
        context: characters in one sample; at most the model's ``context``.
        batch_size: samples in one batch of one process.
        prompt: the text that ``predict`` continues.
    """

    def __init__(self, context: int = 64, batch_size: int = 32, prompt: str = "The ") -> None:
        self.context, self.batch_size, self.prompt = context, batch_size, prompt

    def setup(self, stage: str) -> None:
        # Topics quote each other: remove duplicates, so that no validation paragraph is trained on.
        paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
        kept = len(paragraphs) * 9 // 10
        self.train, self.val = self.samples(paragraphs[:kept]), self.samples(paragraphs[kept:])

    def samples(self, paragraphs: list[str]) -> TensorDataset:
        """Return pairs ``[context]`` of characters and the characters that follow them."""
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
