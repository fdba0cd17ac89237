"""A small BERT learns which package a docstring comes from."""

import pytest
import torch

import geartrain as gt

pytest.importorskip("transformers", reason="tests/requirements.txt installs it")

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


@pytest.mark.example
@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "single", "--data.num_workers", 1],
        ["--strategy", "ddp", "--devices", 2, "--data.batch_size", 16],
    ],
    ids=lambda options: options[1],
)
def test_packages_are_recognised(example, report, options):
    best = ["--plugin", "model_checkpoint", "--model_checkpoint.monitor", "val_acc"]
    best += ["--model_checkpoint.mode", "max"]
    small = ["--max-epochs", 8, "--seed", 1]
    ran = example("transformers_classifier", *small, *best, *options)
    assert ran.metrics()["val_acc"] > 0.7  # the most frequent package has 0.19
    assert len(list((ran.output / "checkpoints").glob("*.ckpt"))) == 1
    assert "val_acc" in report(ran)


@pytest.fixture(scope="module")
def classifier(part):
    return part("transformers_classifier")


@pytest.fixture(scope="module")
def data(classifier):
    return classifier.Docstrings(batch_size=4)


def test_texts_are_used_once(classifier):
    texts = [text for name in classifier.PACKAGES for text in classifier.docstrings(name)]
    assert len(texts) > 1000
    assert len(set(texts)) > 0.98 * len(texts)


@pytest.mark.example
def test_batches_are_as_long_as_their_longest_text(classifier):
    lengths = set()
    for batch in classifier.Docstrings(batch_size=4).val_dataloader():
        rows, length = batch["input_ids"].shape
        assert batch["attention_mask"].shape == (rows, length)
        assert batch["labels"].shape == (rows,)
        assert batch["attention_mask"].sum(dim=1).max() == length <= 64
        lengths.add(length)
    assert len(lengths) > 1


def test_one_step_trains_and_validates(classifier, data):
    torch.manual_seed(0)
    module = classifier.Classifier(width=32, layers=1)
    trainer = gt.Trainer(accelerator="cpu", fast_dev_run=True, enable_progress_bar=False)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 1
    assert 0 <= trainer.callback_metrics["val_acc"] <= 1
