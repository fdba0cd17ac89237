"""The example of README's first command."""

import pytest

pytestmark = [
    pytest.mark.example,
    pytest.mark.timeout(240),
]  # the tests train, which takes longer on a busy machine


@pytest.mark.parametrize(
    "strategy",
    [["--strategy", "single"], ["--strategy", "ddp", "--devices", "2"]],
    ids=["single", "ddp"],
)
def test_digits_reach_their_accuracy(example, strategy):
    ran = example("digits", "--max-epochs", 20, "--seed", 1, *strategy)
    assert ran.metrics()["val_acc"] >= 0.97
    assert "val_acc" in ran.printed  # the final table
