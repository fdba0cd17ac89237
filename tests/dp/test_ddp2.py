"""ddp2 on two nodes (two programs on this machine) trains like one device with doubled batches."""

from functools import cache

import pytest
import torch
from several_ranks import kept_by, results
from torch.utils.data import DataLoader
from torchmetrics.regression import MeanSquaredError

import geartrain as gt

from .cases import CASES, Contrastive, Curve, Net, one_trainer, samples, train, weights
from .measures import Measures

EVEN = [name for name, case in CASES.items() if case[2] % 2 == 0]


class Uneven(Net):
    """Gathers over nodes with unequal numbers of parts, in ``validation_step_end``."""

    def __init__(self):
        super().__init__()
        self.parts, self.rows = [], []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        return batch[0][:, 0]

    def validation_step_end(self, outputs):
        self.parts.append(len(outputs))
        gathered = self.all_gather(torch.cat(outputs))
        self.rows.append(sum(len(part) for part in gathered))
        return outputs


class Gathering(Net):
    def training_step(self, batch, batch_idx):
        self.all_gather(batch[0])


class Measured(Measures, Net):
    pass


class OnStep(Net):
    def __init__(self):
        super().__init__()
        self.mse = MeanSquaredError(dist_sync_on_step=True)


class Counting:
    """Counts buckets, and records the methods that go through DDP's forward."""

    def __init__(self):
        self.buckets, self.methods = [], set()

    @gt.hookimpl(wrapper=True)
    def wrap_model(self, run):
        model = yield
        model.register_comm_hook(self.buckets, reduced)
        model.register_forward_pre_hook(lambda ddp, args: self.methods.add(args[0]))
        return model


def reduced(buckets, bucket):
    buckets.append(bucket.index())
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def be_a_node():
    """Train everything as one node of two."""
    found, counting = {"cases": {}}, Counting()
    nodes = {"num_nodes": 2, "strategy": "ddp2"}
    for name, (_, _, size, _) in CASES.items():
        if size % 2 == 0:
            options = (
                {"strategy_options": {"find_unused_parameters": True}} if "unused" in name else {}
            )
            trainer, curve, trained = train(name, batch_size=size // 2, **nodes, **options)
            found["cases"][name] = (curve, trained)
    found["batch"] = (trainer.plan.global_batch, trainer.plan.per_device_batch, trainer.world_size)

    trainer = one_trainer(devices=2, accumulate_grad_batches=3, plugins=[counting], **nodes)
    trainer.fit(Net(), DataLoader(samples(), batch_size=4), DataLoader(samples(), batch_size=4))
    found["reductions"] = (len(counting.buckets), trainer.global_step)
    found["through DDP"] = counting.methods

    module = Uneven()
    # The nodes get 8 and 7 samples: the last batch has 4 on one node and 3 on the other.
    val = DataLoader(samples(15), batch_size=4)
    trainer = one_trainer(devices=4, **nodes)
    trainer.fit(module, DataLoader(samples(), batch_size=4), val)
    found["fit's own validation"] = dict(trainer.run.metrics)
    found["validated"] = trainer.validate(module, val)[0]
    found["parts"], found["rows"] = module.parts, module.rows
    found["predictions"] = len(trainer.predict(module, val))
    found["weights"] = weights(module)

    module, curve = Contrastive(), Curve("loss_step")
    trainer = one_trainer(devices=2, plugins=[curve], **nodes)
    trainer.fit(module, DataLoader(samples(), batch_size=6), DataLoader(samples(20), batch_size=5))
    found["contrastive"] = (curve.values, weights(module), dict(trainer.run.metrics))

    trainer = one_trainer(devices=2, **nodes)
    trainer.fit(
        Measured(), DataLoader(samples(), batch_size=3), DataLoader(samples(25), batch_size=3)
    )
    found["measured"] = dict(trainer.run.metrics)
    try:
        one_trainer(devices=2, **nodes).fit(OnStep(), DataLoader(samples(), batch_size=4))
    except gt.TrainingError as error:
        found["on step"] = str(error)

    try:
        one_trainer(devices=2, **nodes).fit(Gathering(), DataLoader(samples(), batch_size=4))
    except gt.TrainingError as error:
        found["gathering"] = str(error)
    return found


nodes = kept_by(be_a_node, place="node")


@cache
def one_device(name):
    _, curve, expected = train(name, "single")
    return curve, expected


@pytest.mark.parametrize("name", EVEN)
def test_two_nodes_train_like_one_device(nodes, name):
    curve, expected = one_device(name)
    theirs, trained = nodes[0]["cases"][name]
    assert theirs == pytest.approx(curve, rel=1e-5)
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], nodes[1]["cases"][name][1][key]), (
            f"{key} differs between nodes"
        )


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
    (expected,) = one_trainer(strategy="single").validate(
        module, DataLoader(samples(15), batch_size=4)
    )
    assert first["validated"] == pytest.approx(expected, rel=1e-5)
    assert (first["parts"], second["parts"]) == ([4, 4] * 2, [4, 3] * 2)
    assert first["rows"] == second["rows"] == [8, 7] * 2
    assert (first["predictions"], second["predictions"]) == (4, 4)  # of both nodes


def test_a_loss_over_a_nodes_batch_is_the_mean_over_nodes(nodes):
    (curve, trained, metrics), (_, theirs, their_metrics) = (
        nodes[0]["contrastive"],
        nodes[1]["contrastive"],
    )
    x, y = samples().tensors
    module, expected = Contrastive(), []
    module.log = lambda *arguments, **options: None
    optimizer = module.configure_optimizers()
    for start in range(0, 48, 12):
        # Each node has every second sample, and only the node's samples are in its loss.
        of_nodes = [
            module.loss(
                "loss",
                [module.part((x[start + i : start + 12 : 2], y[start + i : start + 12 : 2]))],
            )
            for i in range(2)
        ]
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
        assert node["gathering"].startswith(
            "geartrain-dp[ddp2]: self.all_gather inside a step sees a part of the batch only"
        )


@pytest.mark.filterwarnings("ignore:Metric `Spearman")
def test_metrics_of_an_epoch_are_of_all_parts_on_all_nodes(nodes):
    trainer = one_trainer(strategy="single")
    trainer.fit(
        Measured(), DataLoader(samples(), batch_size=6), DataLoader(samples(25), batch_size=6)
    )
    # The value of a step is that of the node's batch.
    whole = {
        name: value
        for name, value in trainer.run.metrics.items()
        if name + "_step" not in trainer.callback_metrics
    }
    whole = {name: value for name, value in whole.items() if not name.endswith(("_step", "loss"))}
    assert {
        "fit_mse_epoch",
        "fit_each/f1_epoch",
        "val_accuracy_epoch",
        "val_pearson",
        "val_rank",
        "val_updated/f1",
    } <= set(whole)
    for node in nodes:
        assert {name: node["measured"][name] for name in whole} == pytest.approx(whole, rel=1e-4)


def test_a_metric_that_syncs_on_each_step_is_refused(nodes):
    for node in nodes:
        assert node["on step"].startswith(
            "geartrain-dp[ddp2]: mse (MeanSquaredError) has dist_sync_on_step=True"
        )


def be_the_only_node():
    trainer, curve, trained = train("3 samples on 2 devices", "ddp2")
    return trainer.world_size, curve, trained


def test_one_node_is_dp(tmp_path):
    ((size, curve, trained),) = results(tmp_path, be_the_only_node, ranks=1, place="alone")
    _, expected_curve, expected = train("3 samples on 2 devices", "dp")
    assert size == 1
    assert curve == pytest.approx(expected_curve, rel=1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-6, atol=1e-7)
    assert not torch.equal(trained["last.weight"], weights(Net())["last.weight"])
