"""A graph network learns the digits from 100 labels; ranks share the nodes of one graph."""

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.testing import ThreadRanks

pytestmark = pytest.mark.timeout(240)  # the tests train, which takes longer on a busy machine


@pytest.fixture(scope="module", autouse=True)
def _torch_geometric():
    """Import it in the process that runs these tests; it takes seconds."""
    pytest.importorskip("torch_geometric", reason="tests/requirements.txt installs it")


@pytest.mark.example
@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "single"],
        ["--strategy", "ddp", "--devices", 2, "--data.batch_size", 50],
    ],
    ids=lambda options: options[1],
)
def test_the_labels_reach_the_other_digits(example, report, options):
    ran = example("gcn", "--max-epochs", 40, "--seed", 1, *options)
    assert ran.metrics()["val_acc"] > 0.9  # a logistic regression of the 100 labels has 0.87
    assert "val_acc" in report(ran)


@pytest.fixture(scope="module")
def gcn(part):
    return part("gcn")


def trained(gcn, strategy, batch_size):
    """Return the weights after one step without dropout, and the accuracy."""
    torch.manual_seed(0)
    module, data = gcn.GCN(hidden=8), gcn.DigitsGraph(batch_size)
    module.dropout = nn.Identity()
    trainer = gt.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, seed=1, enable_progress_bar=False
    )
    trainer.fit(module, datamodule=data)
    return module.state_dict(), trainer.callback_metrics["val_acc"]


def test_two_ranks_take_the_step_of_one_process(gcn):
    weights, accuracy = trained(gcn, "auto", 100)
    on_ranks, same = trained(gcn, ThreadRanks(2), 50)
    for name, weight in weights.items():
        torch.testing.assert_close(on_ranks[name], weight, msg=name)
    assert same == pytest.approx(accuracy)


def test_predictions_are_in_the_order_of_the_unlabelled_nodes(gcn):
    data = gcn.DigitsGraph()
    data.setup("predict")
    asked = [graph.nodes for graph in data.predict_dataloader()]
    assert torch.cat(asked).tolist() == data.unlabelled
    assert len(set(data.labelled)) == 100
    assert set(data.labelled).isdisjoint(data.unlabelled)
    trainer = gt.Trainer(accelerator="cpu", enable_progress_bar=False)
    answers = trainer.predict(gcn.GCN(hidden=8), datamodule=data)
    assert [len(answer) for answer in answers] == [1000, 697]
