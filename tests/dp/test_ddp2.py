"""ddp2 on two nodes, which are two programs on this machine, trains as one device does with batches twice as large."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from geartrain.testing.launching import launched

from ..ddp.test_launchers import free_port
from .cases import CASES, Contrastive, Net, one_trainer, samples, train, weights
from .measures import Measures

NODE = str(Path(__file__).with_name("node.py"))
EVEN = [name for name, case in CASES.items() if case[2] % 2 == 0]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """What each node kept."""
    folder, port = tmp_path_factory.mktemp("nodes"), str(free_port())
    with ExitStack() as stack:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runs = [stack.enter_context(launched(NODE, folder=folder, name=f"node-{i}", NODE_RANK=str(i), **where)) for i in range(2)]
        for run in runs:
            assert run.wait(90) == 0, runs[0].err + runs[1].err
    return [torch.load(folder / f"kept-{i}.pt", weights_only=False) for i in range(2)]


class Measured(Measures, Net):
    pass


@cache
def one_device(name):
    _, curve, expected = train(name, "single")
    return curve, expected


@pytest.mark.parametrize("name", EVEN)
def test_two_nodes_train_as_one_device_does(nodes, name):
    curve, expected = one_device(name)
    theirs, trained = nodes[0]["cases"][name]
    assert theirs == pytest.approx(curve, rel=1e-5)
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], nodes[1]["cases"][name][1][key]), f"{key} differs between nodes"


def test_the_effective_batch_is_that_of_all_nodes(nodes):
    size = CASES[EVEN[-1]][2]
    assert nodes[0]["batch"] == nodes[1]["batch"] == (size, -(-size // 2 // 2), 2)


def test_gradients_are_reduced_once_a_step(nodes):
    assert nodes[0]["reductions"] == nodes[1]["reductions"] == (2, 2)


def test_only_training_goes_through_ddps_forward(nodes):
    assert nodes[0]["through DDP"] == {"training_step"}


def test_evaluation_splits_and_counts_every_sample_once(nodes):
    first, second = nodes
    assert first["validated"]["samples"] == 15
    assert first["fit's own validation"] == pytest.approx(second["fit's own validation"])
    module = Net()
    module.load_state_dict(first["weights"])
    (expected,) = one_trainer(strategy="single").validate(module, DataLoader(samples(15), batch_size=4))
    assert first["validated"] == pytest.approx(expected, rel=1e-5)
    assert (first["parts"], second["parts"]) == ([4, 4] * 2, [4, 3] * 2)
    assert first["rows"] == second["rows"] == [8, 7] * 2
    assert (first["predictions"], second["predictions"]) == (4, 4)  # of both nodes


def test_a_loss_over_a_nodes_batch_is_the_mean_over_nodes(nodes):
    (curve, trained, metrics), (_, theirs, their_metrics) = nodes[0]["contrastive"], nodes[1]["contrastive"]
    x, y = samples().tensors
    module, expected = Contrastive(), []
    module.log = lambda *arguments, **options: None
    optimizer = module.configure_optimizers()
    for start in range(0, 48, 12):
        # Each node has every second sample, and only a node's own samples are in its loss.
        of_nodes = [module.loss("loss", [module.part((x[start + i : start + 12 : 2], y[start + i : start + 12 : 2]))]) for i in range(2)]
        loss = sum(of_nodes) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert curve == pytest.approx(expected, rel=1e-5)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained[key], theirs[key])
    assert metrics["val_loss"] == their_metrics["val_loss"]


def test_gathering_inside_a_part_is_an_error_with_the_fix(nodes):
    for node in nodes:
        assert node["gathering"].startswith("geartrain-dp[ddp2]: self.all_gather inside a step sees a part of the batch only")


@pytest.mark.filterwarnings("ignore:Metric `Spearman")
def test_metrics_of_an_epoch_are_of_all_parts_on_all_nodes(nodes):
    trainer = one_trainer(strategy="single")
    trainer.fit(Measured(), DataLoader(samples(), batch_size=6), DataLoader(samples(25), batch_size=6))
    # A step's value is of the node's own batch.
    whole = {name: value for name, value in trainer.callback_metrics.items() if name + "_step" not in trainer.callback_metrics}
    whole = {name: value for name, value in whole.items() if not name.endswith(("_step", "loss"))}
    assert {"fit_mse_epoch", "fit_each/f1_epoch", "val_accuracy_epoch", "val_pearson", "val_rank", "val_updated/f1"} <= set(whole)
    for node in nodes:
        assert {name: node["measured"][name] for name in whole} == pytest.approx(whole, rel=1e-4)


def test_a_metric_that_syncs_on_each_step_is_refused(nodes):
    for node in nodes:
        assert node["on step"].startswith("geartrain-dp[ddp2]: mse (MeanSquaredError) has dist_sync_on_step=True")


def test_one_node_is_dp(tmp_path):
    body = f"""
import sys
sys.path.insert(0, {str(Path(NODE).parent)!r})
import torch
from cases import train
trainer, curve, trained = train("3 samples on 2 devices", "ddp2")
torch.save((trainer.world_size, curve, trained), "kept.pt")
"""
    (tmp_path / "one.py").write_text(body)
    with launched("one.py", folder=tmp_path) as run:
        run.succeed()
    size, curve, trained = torch.load(tmp_path / "kept.pt", weights_only=False)
    _, expected_curve, expected = train("3 samples on 2 devices", "dp")
    assert size == 1
    assert curve == pytest.approx(expected_curve, rel=1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-6, atol=1e-7)
    assert not torch.equal(trained["last.weight"], weights(Net())["last.weight"])
