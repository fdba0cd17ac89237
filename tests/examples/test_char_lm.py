"""A small transformer learns the text of Python's help topics."""

import math
from collections import Counter

import pytest
import torch

import geartrain as gt

# The tests train, which takes longer on a busy machine.
pytestmark = pytest.mark.timeout(240)

SMALL = [
    "--model.width",
    64,
    "--model.heads",
    2,
    "--model.layers",
    2,
    "--max-steps",
    160,
    "--seed",
    1,
    "--limit-val-batches",
    4,
]


def entropy(data):
    """Bits per character of the best model without context, on the validation characters."""
    counts = Counter(torch.cat([following for _, following in data.val]).tolist())
    return -sum(n / counts.total() * math.log2(n / counts.total()) for n in counts.values())


@pytest.fixture
def chars(part):
    return part("char_lm")


@pytest.fixture
def data(chars):
    topics = chars.Topics()
    topics.setup("fit")
    return topics


@pytest.mark.example
def test_it_learns_to_use_the_context(example, data):
    ran = example(
        "char_lm",
        *SMALL,
        "--plugin",
        "throughput",
        "--throughput.tokens",
        64,
        "--log-every-n-steps",
        40,
    )
    metrics = ran.metrics()
    assert metrics["val_bits_per_char"] < 0.85 * entropy(data)
    assert metrics["val_bits_per_char"] == pytest.approx(metrics["val_loss"] / math.log(2))
    assert metrics["device/tokens_per_sec"] == pytest.approx(64 * metrics["device/samples_per_sec"])

    said = example(
        "char_lm",
        "predict",
        *SMALL[:6],
        "--checkpoint",
        ran.output / "last.ckpt",
        "--data.prompt",
        "An object",
    )
    assert said.code == 0, said.errors
    [[text]] = torch.load(said.output / "predictions.pt", weights_only=True)
    assert text.startswith("An object")
    assert len(text) == len("An object") + 400
    assert text in said.printed
    assert text.count(" ") > 20  # it has learned that there are words


@pytest.mark.example
def test_two_ranks_learn_too(example, data):
    ran = example(
        "char_lm",
        *SMALL,
        "--max-steps",
        120,
        "--strategy",
        "ddp",
        "--devices",
        2,
        "--log-every-n-steps",
        20,
    )
    assert ran.metrics()["val_bits_per_char"] < 0.85 * entropy(data)
    losses = ran.flushed("train_loss")
    assert losses[-1] < losses[0] - 0.4


def test_no_prediction_sees_later_characters(chars):
    torch.manual_seed(0)
    model = chars.CharLM(context=16, width=32, heads=2, layers=2)
    text = torch.randint(96, (1, 16))
    other = text.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 96
    with torch.no_grad():
        before, after = model(text), model(other)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_prediction_looks_back_on_the_whole_context(chars):
    torch.manual_seed(0)
    model = chars.CharLM(context=16, width=32, heads=2, layers=1)
    text = torch.randint(96, (1, 16))
    other = text.clone()
    other[0, 0] = (other[0, 0] + 1) % 96
    with torch.no_grad():
        assert not torch.equal(model(text)[0, -1], model(other)[0, -1])


def test_the_first_loss_equals_random_guessing(chars, data):
    torch.manual_seed(0)
    inputs, following = (
        torch.stack(column) for column in zip(*(data.train[i] for i in range(64)), strict=True)
    )
    assert chars.CharLM().loss((inputs, following)).item() == pytest.approx(math.log(96), abs=0.2)


def test_each_place_is_followed_by_the_next(chars, data):
    inputs, following = data.train[3]
    assert inputs.shape == following.shape == (64,)
    assert torch.equal(inputs[1:], following[:-1])
    assert torch.equal(following[-1], data.train[4][0][0])


def test_training_and_validation_texts_are_disjoint(chars, data):
    train, val = (
        chars.decode(torch.cat([inputs for inputs, _ in part])).split("\n\n")
        for part in (data.train, data.val)
    )
    # The first and last paragraphs are cut. Short ones may be equal in the model's alphabet.
    assert not {p for p in train[1:-1] if len(p) > 40} & {p for p in val[1:-1] if len(p) > 40}
    assert 0.05 < len(data.val) / (len(data.train) + len(data.val)) < 0.15


def test_text_is_read_and_written(chars):
    assert chars.decode(chars.encode("def f(x):\n    return ~x")) == "def f(x):\n    return ~x"
    assert chars.decode(chars.encode("naïve")) == "na?ve"


def test_a_width_that_heads_cannot_share_is_refused(chars):
    with pytest.raises(gt.UsageError, match=r"width=65 cannot be shared by 4 heads\."):
        chars.CharLM(width=65)
