"""deepspeed trains as ddp does, and its checkpoints are those of any strategy."""

import pytest
import torch
from several_ranks import kept_by

from .cases import CASES, IN_WHOLES, MODULES, PAIRS, STAGES, interchange, train_all

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(300)]

trained = kept_by(train_all, seconds=280)
resumed = kept_by(interchange, seconds=280)


def assert_equal(found, expected, tolerance=1e-5):
    assert list(found) == list(expected)
    for key, value in found.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(s, n) for s in STAGES for n in {**CASES, **IN_WHOLES} if s < 3 or n in CASES],
)
def test_it_trains_as_ddp_does(trained, stage, name):
    steps, metrics, weights = trained[0][stage][name]
    expected_steps, expected_metrics, expected = trained[0]["ddp"][name]
    tolerance = 2e-2 if name == "bf16-mixed" else 1e-5
    assert steps == expected_steps == 20
    assert metrics == pytest.approx(expected_metrics, rel=tolerance)
    assert_equal(weights, expected, tolerance)


def test_after_a_run_other_ranks_have_weights_in_stages_1_and_2(trained):
    for stage in (1, 2):
        assert_equal(trained[1][stage]["adam"][2], trained[0][stage]["adam"][2])
    assert all(value.isnan().all() for value in trained[1][3]["adam"][2].values())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("saving", "resuming"), PAIRS)
def test_another_strategy_resumes(resumed, name, saving, resuming):
    assert_equal(resumed[0][name, saving, resuming], resumed[0][name, "at once"])
