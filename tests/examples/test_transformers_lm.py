"""A Hugging Face transformers model, inside a Module and directly, without network."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import geartrain as gt

pytest.importorskip(
    "transformers", reason="it is large: only the tox environment examples installs it"
)
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


@pytest.fixture
def gpt2(part):
    return part("transformers_lm")


@pytest.fixture
def bound(gpt2):
    """Nats per byte of the best model without context, on the validation bytes."""
    counts = Counter(gpt2.HelpTopics().val.pieces.flatten().tolist())
    return -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())


@pytest.mark.example
def test_a_module_around_it_learns_and_is_saved(example, gpt2, bound):
    small = [
        "--model.width",
        64,
        "--model.lr",
        3e-3,
        "--max-steps",
        60,
        "--num-sanity-val-steps",
        0,
        "--seed",
        1,
    ]
    ran = example("transformers_lm", *small, "--strategy", "single", cli=True)
    assert ran.metrics()["val_loss"] < 0.9 * bound
    assert (ran.output / "model" / "model.safetensors").is_file()

    again = GPT2LMHeadModel.from_pretrained(ran.output / "model").eval()
    module = gpt2.LanguageModel(width=64).eval()
    module.load_state_dict(torch.load(ran.output / "last.ckpt", weights_only=True)["model"])
    tokens = torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, module.model(input_ids=tokens).logits)


@pytest.mark.example
def test_the_model_as_it_is_learns_and_is_saved(example, gpt2, bound):
    options = ["--max-steps", 60, "--strategy", "ddp", "--devices", 2]
    ran = example("transformers_lm", *options, option="--save")
    assert ran.code == 0, ran.errors
    again = GPT2LMHeadModel.from_pretrained(ran.output).eval()
    with torch.no_grad():
        losses = [again(**pieces).loss for pieces in gpt2.HelpTopics().val_dataloader()]
    assert torch.stack(losses).mean() < 0.9 * bound


def test_an_untrained_model_equals_random_guessing(gpt2):
    torch.manual_seed(0)
    [batch] = DataLoader(gpt2.HelpTopics().train, batch_size=8, sampler=range(8))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (8, 128)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert gpt2.small_gpt2().eval()(**batch).loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_bytes_are_the_text_and_none_is_in_both_parts(gpt2):
    data = gpt2.HelpTopics()
    train, val = (
        bytes(part.pieces.flatten().tolist()).decode(errors="replace").split("\n\n")
        for part in (data.train, data.val)
    )
    assert any("statement" in paragraph for paragraph in train)
    assert not set(train[1:-1]) & set(val[1:-1])


def test_another_model_with_its_own_loss_works_in_the_same_way(tmp_path):
    """BERT predicts if a sentence begins with a token of the upper half of the vocabulary."""
    torch.manual_seed(0)
    tokens = torch.randint(32, (256, 8))
    samples = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": (row[0] >= 16).long()}
        for row in tokens
    ]
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = BertConfig(vocab_size=32, max_position_embeddings=8, num_labels=2, **size)
    model = BertForSequenceClassification(config)
    trainer = gt.Trainer(accelerator="cpu", max_epochs=8, seed=1, enable_progress_bar=False)
    trainer.fit(
        model,
        DataLoader(samples, batch_size=16, shuffle=True),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
    )
    assert trainer.callback_metrics["train_loss"] < 0.3 * math.log(2)

    model.save_pretrained(tmp_path)
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    [outputs] = trainer.predict(
        model, DataLoader([{"input_ids": row} for row in tokens], batch_size=256)
    )
    assert torch.equal(again.eval()(input_ids=tokens).logits, outputs.logits)
