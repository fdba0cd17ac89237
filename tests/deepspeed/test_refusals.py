"""What deepspeed refuses, before any process starts unless the message names a rank."""

import json
import re

import pytest
from regression import Net, one_trainer, samples
from several_ranks import failed
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.callbacks import EMA
from geartrain_deepspeed import DeepSpeedStrategy

from .cases import go_wrong

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(120)]


class Halves(Net):
    def __init__(self):
        super().__init__()
        self.last.bias = nn.Parameter(self.last.bias.bfloat16())


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "given", "options", "message"),
    [
        (Net, {}, {"stage": 4}, "stage=4 must be 1, 2 or 3"),
        (Halves, {}, {}, "last.bias is torch.bfloat16, and DeepSpeed trains torch.float32"),
        (Manual, {}, {}, "not in manual optimisation"),
        (Net, {"precision": "bf16-true"}, {}, "precision bf16-true is not supported"),
        (
            Net,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            {},
            "clips the norm of the gradients, not their values",
        ),
        (Net, {"plugins": ["norms"]}, {}, "norms] may need the gradients"),
        (Net, {"plugins": [EMA(0.5)]}, {"stage": 3}, "averages weights"),
    ],
)
def test_before_any_process_starts(module, given, options, message):
    with pytest.raises(gt.UsageError, match=re.escape(message)):
        one_trainer(strategy="deepspeed", strategy_options=options, devices=2, **given).fit(
            module(), DataLoader(samples(), 6)
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "Trainer(accumulate_grad_batches=...) decides"),
        ({"gradient_clipping": 1.0}, "Trainer(gradient_clip_val=...) decides"),
        ({"bf16": {"enabled": True}}, "Trainer(precision=...) decides"),
        ({"zero_optimisation": {}}, "Did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stage": 3}}, "Fix: --strategy.stage 3"),
        ({"zero_optimization": {"offload_param": {}}}, "does not support. Fix: --strategy fsdp"),
        ([], "is not an object"),
    ],
)
def test_a_file_that_contradicts_the_trainer(tmp_path, config, message):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(config))
    with pytest.raises(gt.UsageError, match=re.escape(message)):
        DeepSpeedStrategy(config=str(file))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unused", "did not use these parameters in a step: extra.weight, extra.bias. Fix: "),
        ("freezes", "requires_grad of second.weight was changed"),
        ("two", "DeepSpeed steps one optimizer"),
        ("whole", "Adagrad cannot step parts, and each rank has a flat part of all"),
        ("scaled", "Scaled cannot step parts"),
        ("changes", "first.bias was changed, and in stage 3 each rank has a part of it"),
        *(
            (f"saves {part}", "pickles a parameter, as torch.save does, and in stage 3 has only")
            for part in ("weights", "parameter")
        ),
    ],
)
def test_on_the_ranks(tmp_path, kind, message):
    ranks = failed(tmp_path, go_wrong, kind)
    # The rank that waits for a failed one may only see that it has gone.
    for rank in [rank for rank in ranks if "Connection" not in rank.error] or ranks:
        assert message in rank.error
