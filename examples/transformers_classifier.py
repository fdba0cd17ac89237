r"""A classifier of Hugging Face transformers: which package of Python does a docstring come from?

It needs `pip install -c constraints.txt transformers`, and downloads nothing: the tokenizer learns
its words from the docstrings, and a small BERT starts from random weights.

geartrain fit examples/transformers_classifier.py --max-epochs 8 --seed 1 --output runs/docs \
    --plugin model_checkpoint --model_checkpoint.monitor val_acc --model_checkpoint.mode max
geartrain fit examples/transformers_classifier.py --max-epochs 8 --seed 1 \
    --strategy ddp --devices 2 --data.batch_size 16
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

import geartrain as gt

WORDS, LENGTH = 2000, 64  # size of the vocabulary, and tokens of a text that are used
PACKAGES = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "urllib", "xml")


def docstrings(package: str) -> list[str]:
    """Return the different docstrings of a package of the standard library, in a fixed order."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[ast.get_docstring(node) or ""] = None
    return [text for text in found if len(text) > 20]


class Docstrings(gt.DataModule):
    """Four fifths of the docstrings for training, one fifth for validation and test.

    A batch is a dict of ``input_ids`` and ``attention_mask`` ``[batch, length]``, as long as its
    longest text, and ``labels`` ``[batch]``.

    Args:
        batch_size: texts in one batch of one process.
        num_workers: processes that prepare batches, for each loader.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        self.options = {"batch_size": batch_size, "num_workers": num_workers}
        texts = [(text, i) for i, name in enumerate(PACKAGES) for text in docstrings(name)]
        random.Random(0).shuffle(texts)
        held_out = len(texts) // 5
        words_of = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        words_of.normalizer = normalizers.Lowercase()
        words_of.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]"]
        trainer = trainers.WordPieceTrainer(
            vocab_size=WORDS, special_tokens=special, show_progress=False
        )
        words_of.train_from_iterator((text for text, _ in texts[held_out:]), trainer)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words_of, pad_token="[PAD]", unk_token="[UNK]"
        )
        samples = [
            {**self.tokenizer(text, truncation=True, max_length=LENGTH), "labels": label}
            for text, label in texts
        ]
        self.val, self.train = samples[:held_out], samples[held_out:]

    def loader(self, samples, **options) -> DataLoader:
        pad = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(samples, collate_fn=pad, **self.options, **options)

    def train_dataloader(self):
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.val)

    test_dataloader = val_dataloader


class Classifier(gt.Module):
    """A small BERT from texts to packages.

    Args:
        width: the size of the vector of one token; a multiple of 32.
        layers: the number of blocks.
        lr: AdamW's largest learning rate; it rises at the start and then falls to the end.
    """

    def __init__(self, width: int = 64, layers: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            intermediate_size=2 * width,
            max_position_embeddings=LENGTH,
            num_labels=len(PACKAGES),
        )
        self.model = BertForSequenceClassification(config)
        self.val_acc = MulticlassAccuracy(len(PACKAGES), average="micro")

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.val_acc.update(output.logits, batch["labels"])
        self.log("val_loss", output.loss, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    gt.cli(Classifier, Docstrings)
