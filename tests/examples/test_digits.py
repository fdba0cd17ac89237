"""The example that README's first command trains."""

import pytest

pytestmark = [
    pytest.mark.example,
    pytest.mark.timeout(240),
]  # programs that train, on a machine that does other things as well


@pytest.mark.parametrize(
    "strategy",
    [["--strategy", "single"], ["--strategy", "ddp", "--devices", "2"]],
    ids=["single", "ddp"],
)
def test_digits_reach_their_accuracy(example, strategy):
    ran = example("digits", "--max-epochs", 20, "--seed", 1, *strategy)
    assert ran.metrics()["val_acc"] >= 0.97
    assert "val_acc" in ran.printed  # the closing table
