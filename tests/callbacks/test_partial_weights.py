"""``partial_weights``: a run starts from the weights that fit, and prints the others."""

import pytest
import torch
from small_models import EvalNet, Net, assert_equal, fit, loader, trainer
from threads import on_threads
from torch import nn

import geartrain as gt
from geartrain.callbacks import PartialWeights


class Wider(EvalNet):
    """Another head, and a layer that the file does not have."""

    def __init__(self):
        super().__init__()
        self.layers[2] = nn.Linear(4, 2)
        self.new = nn.Linear(1, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def forward(self, x):
        return self.layers(x)[:, :1] + 0 * self.new(x[:, :1])


@pytest.fixture
def file(tmp_path):
    fit(output=tmp_path / "run")
    return tmp_path / "run" / "last.ckpt"


def test_a_fit_starts_from_the_weights_that_fit(file, capsys):
    module = Wider()
    head = module.layers[2].weight.detach().clone()
    runner = trainer(plugins=["partial_weights"])
    runner.fit(module, loader(), checkpoint=file)
    saved = torch.load(file, weights_only=True)["model"]
    assert torch.equal(module.layers[0].weight, saved["layers.0.weight"])
    assert torch.equal(module.layers[2].weight, head)
    assert runner.global_step == 6
    printed = capsys.readouterr().err
    assert (
        f"{file}: loaded 2 of 6 weights\n  missing in the file, left as they were: new.w" in printed
    )
    assert "layers.2.weight [1, 4], here [2, 4], layers.2.bias [1], here [2]" in printed


def test_only_rank_0_prints_and_all_ranks_load(file, capsys):
    runner, strategy = on_threads(2, max_epochs=1, plugins=[PartialWeights()])
    runner.fit(Wider(), loader(batch_size=2), checkpoint=file)
    first, second = (run.module for run in strategy.runs)
    assert_equal(first, second)
    assert capsys.readouterr().err.count("loaded 2 of 6 weights") == 1


@pytest.mark.parametrize("key", ["state_dict", None])
def test_weights_of_other_libraries_with_a_prefix(tmp_path, key):
    first = nn.Linear(3, 4)
    state = first.state_dict() if key is None else {key: first.state_dict()}
    torch.save(state, tmp_path / "pretrained.pt")
    module = Wider()
    trainer(plugins=[PartialWeights(prefix="layers.0.")]).test(
        module, loader(), ckpt_path=tmp_path / "pretrained.pt"
    )
    assert torch.equal(module.layers[0].weight, first.weight)


def test_a_resume_needs_all_weights(file):
    with pytest.raises(gt.TrainingError, match="does not fit Wider"):
        trainer(plugins=[PartialWeights()], max_epochs=2).fit(Wider(), loader(), ckpt_path=file)


def test_a_file_without_a_weight_that_fits_is_an_error(tmp_path):
    torch.save({"model": {"other.weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(gt.UsageError, match="has no weight that fits Net: missing in the file: "):
        trainer(plugins=[PartialWeights()]).fit(Net(), loader(), checkpoint=tmp_path / "other.ckpt")
    torch.save({"a": 1}, tmp_path / "none.ckpt")
    with pytest.raises(gt.TrainingError, match=r"has no weights\. Fix: "):
        trainer(plugins=[PartialWeights()]).fit(Net(), loader(), checkpoint=tmp_path / "none.ckpt")
