"""tensor_parallel trains as one process does, and groups of its ranks as ddp does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from regression import Net, one_trainer, samples
from several_ranks import failed, kept_by, results
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, SumMetric

import geartrain as gt
from geartrain.callbacks import ModelCheckpoint, PredictionWriter

from .cases import CASES, IN_UNITS, train

pytestmark = pytest.mark.timeout(120)

#: Layers of the net.
LAYERS = {"colwise": ["first", "second", "extra"], "rowwise": "last"}
#: Without the cases that the kit has for this strategy.
NAMES = [
    name
    for name in {**CASES, **IN_UNITS}
    if name not in ("16-mixed", "changes", "accumulating", "clipped", "two optimizers")
]


def train_all(strategy, options, ranks, batch, names=NAMES):
    return {name: train(name, strategy, options, ranks, batch) for name in names}


one_model = kept_by(train_all, "tensor_parallel", LAYERS, 2, 12, seconds=110)


@pytest.fixture(scope="module")
def one_process():
    return train_all("single", None, 1, 12)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_one_model_train_as_one_process_does(one_model, one_process, name):
    assert_as(one_model[0][name], one_process[name], 2e-2 if name == "bf16-mixed" else 1e-5)


def assert_as(found, expected, tolerance=1e-5):
    (curve, metrics, weights), (expected_curve, expected_metrics, others) = found, expected
    assert len(curve) > 1
    assert curve == pytest.approx(expected_curve, rel=tolerance)
    # Sums over all samples show if ranks with one model count twice.
    assert metrics == pytest.approx(expected_metrics, rel=tolerance, abs=1e-8)
    assert_equal(weights, others, tolerance)


def assert_equal(weights, expected, tolerance=1e-5):
    assert list(weights) == list(expected)
    for key, value in weights.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)


def test_after_a_run_other_ranks_have_no_weights(one_model):
    assert all(value.isnan().all() for value in one_model[1]["adam"][2].values())


@pytest.mark.parametrize(
    "names",
    [
        ("accumulating", "batch norm", "norms"),
        pytest.param(("adam", "clipped", "manual"), marks=pytest.mark.matrix),
    ],
    ids=", ".join,
)
def test_two_models_train_as_two_ranks_of_ddp_do(tmp_path, names):
    (tmp_path / "ddp").mkdir()
    expected = results(tmp_path / "ddp", train_all, "ddp", None, 2, 6, names)[0]
    options = {**LAYERS, "size": 2}
    found = results(
        tmp_path, train_all, "tensor_parallel", options, 4, 6, names, ranks=4, seconds=110
    )[0]
    for name in names:
        assert_as(found[name], expected[name])


# --- attention, dropout, order --------------------------------------------------------------------


class GPT(gt.Module):
    """One block of a transformer, with a tied embedding and a mask in a buffer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(8))
        q, k, v = (
            layer(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        causal = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        masked = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        x = x + self.dropout(self.out((causal + masked).transpose(1, 2).flatten(-2)))
        return self.head(x)

    def training_step(self, tokens, batch_idx):
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


HEADS = {"colwise": ["q", "k", "v", "head"], "rowwise": ["tokens", "out"]}


def tokens():
    return torch.randint(20, (24, 8), generator=torch.Generator().manual_seed(1))


def train_gpt(strategy, options, devices, seed=1, dropout=0.0, **given):
    """Return the weights after two epochs of shuffled batches."""
    module = GPT(dropout)
    one_trainer(
        strategy=strategy,
        strategy_options=options,
        devices=devices,
        seed=seed,
        max_epochs=2,
        **given,
    ).fit(module, DataLoader(tokens(), 4))
    return dict(module.state_dict())


def test_attention_is_split_by_heads(tmp_path):
    found = results(tmp_path, train_gpt, "tensor_parallel", HEADS, 2)[0]
    assert_equal(found, train_gpt("single", None, 1))


def train_without_seed():
    module = GPT(dropout=0.5)
    trainer = one_trainer(
        strategy="tensor_parallel", strategy_options={**HEADS}, devices=2, max_epochs=2
    )
    torch.seed()  # ranks differ
    trainer.fit(module, DataLoader(tokens(), 4, shuffle=True))
    return trainer.global_step


def test_without_a_seed_ranks_draw_the_same_dropout_and_order(tmp_path):
    assert results(tmp_path, train_without_seed) == [12, 12]


def predict_numbers(strategy, options, devices):
    trainer = one_trainer(strategy=strategy, strategy_options=options, devices=devices)
    outputs = trainer.predict(Net(), DataLoader(samples(11), 2))
    return [each["sum"] for each in outputs]


def test_predictions_come_once_and_in_order(tmp_path):
    options = {**LAYERS, "size": 2}
    found = results(tmp_path, predict_numbers, "tensor_parallel", options, 4, ranks=4)[0]
    expected = predict_numbers("single", None, 1)
    assert torch.equal(torch.cat(found), torch.cat(expected))


def make_on_meta():
    with torch.device("meta"):
        module = Net(shared=True, norm=True)
    trainer = one_trainer(strategy="tensor_parallel", strategy_options=LAYERS, devices=2, seed=1)
    trainer.fit(module, DataLoader(samples(), 12))
    assert module.extra.weight is module.second.weight
    return dict(module.state_dict())


def test_a_module_on_the_meta_device_gets_weights(tmp_path):
    weights = results(tmp_path, make_on_meta)[0]
    assert all(value.isfinite().all() for value in weights.values())
    assert weights["first.weight"].std() > 0.1


def write_predictions():
    writer = PredictionWriter("predictions", "epoch")
    trainer = one_trainer(
        strategy="tensor_parallel",
        strategy_options={**LAYERS, "size": 2},
        devices=4,
        callbacks=[writer],
    )
    trainer.predict(Net(), DataLoader(samples(11), 2), return_predictions=False)


def test_predictions_are_written_once(tmp_path):
    results(tmp_path, write_predictions, ranks=4)
    files = sorted((tmp_path / "predictions").iterdir())
    assert [file.name for file in files] == ["rank-0.pt", "rank-2.pt"]
    indices = [i for file in files for batch in torch.load(file)["indices"] for i in batch]
    assert sorted(indices) == list(range(11))


class Gathers(Net):
    def validation_step(self, batch, batch_idx):
        gathered = self.all_gather(self(batch[0]))
        self.log("rows", float(len(gathered)))
        self.log("mean", gathered.mean())


def gather_in_validation(strategy, options, devices):
    trainer = one_trainer(strategy=strategy, strategy_options=options, devices=devices)
    (found,) = trainer.validate(Gathers(), DataLoader(samples(24), 6))
    return found


def test_all_gather_has_a_row_for_each_rank_with_other_data(tmp_path):
    options = {**LAYERS, "size": 2}
    found = results(tmp_path, gather_in_validation, "tensor_parallel", options, 4, ranks=4)[0]
    (tmp_path / "ddp").mkdir()
    expected = results(tmp_path / "ddp", gather_in_validation, "ddp", None, 2)[0]
    assert found == pytest.approx(expected)
    assert found["rows"] == 2.0


class Measures(Net):
    def __init__(self):
        super().__init__()
        self.error, self.count = MeanSquaredError(), SumMetric()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error(self(x), y)
        self.count(float(len(x)))
        self.log("error", self.error)
        self.log("count", self.count)


def measure(strategy, options, devices):
    trainer = one_trainer(strategy=strategy, strategy_options=options, devices=devices)
    (found,) = trainer.validate(Measures(), DataLoader(samples(11), 2))
    return found


def test_objects_of_torchmetrics_count_each_sample_once(tmp_path):
    options = {**LAYERS, "size": 2}
    found = results(tmp_path, measure, "tensor_parallel", options, 4, ranks=4)[0]
    assert found == pytest.approx(measure("single", None, 1))
    assert found["count"] == 11.0


# --- checkpoints ----------------------------------------------------------------------------------

#: Name -> strategy, options, batches of 6 samples in a step.
WAYS = {
    "ddp": ("ddp", None, 1),
    "fsdp": ("fsdp", {"unit_parameters": 8}, 1),
    "one model": ("tensor_parallel", LAYERS, 2),
}


def fit_from(way, step):
    """Train two epochs, or from the checkpoint of a step; save those of steps 2, 4 and so on."""
    strategy, options, batches = WAYS[way]
    module = Net(optimizer="adam", shared=True)
    saving = ModelCheckpoint(
        dirpath="saved", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    trainer = one_trainer(
        strategy=strategy,
        strategy_options=options,
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=batches,
        callbacks=[] if step else [saving],
    )
    path = Path("saved", f"step={step}.ckpt") if step else None
    trainer.fit(module, DataLoader(samples(), 6), ckpt_path=path)
    return dict(module.state_dict())


@pytest.fixture(scope="module")
def whole():
    """The weights after two epochs of one process."""
    module = Net(optimizer="adam", shared=True)
    one_trainer(max_epochs=2).fit(module, DataLoader(samples(), 12))
    return dict(module.state_dict())


@pytest.fixture(scope="module", params=["one model", "fsdp"])
def folder(request, tmp_path_factory):
    """A folder with the checkpoints of a strategy."""
    made = tmp_path_factory.mktemp("saves")
    results(made, fit_from, request.param, 0)
    return made


@pytest.mark.parametrize(
    ("folder", "resuming"),
    [("one model", "one model"), ("one model", "ddp"), ("fsdp", "one model")],
    indirect=["folder"],
)
def test_another_strategy_resumes_in_the_middle_of_an_epoch(whole, folder, resuming):
    assert_equal(results(folder, fit_from, resuming, 2)[0], whole)


@pytest.mark.parametrize("folder", ["one model"], indirect=True)
def test_a_checkpoint_has_the_state_of_each_rank_with_other_data(folder):
    saved = torch.load(folder / "saved" / "step=2.ckpt", weights_only=True)
    assert len(saved["fit"]["ranks"]) == 1
    assert {type(value) for value in saved["model"].values()} == {torch.Tensor}


# --- refusals -------------------------------------------------------------------------------------


class Reads(Net):
    """Each rank reads other samples."""

    def train_dataloader(self):
        x, y = samples()[:]
        return DataLoader([*zip(x + self.global_rank, y, strict=True)], 12)


class Draws(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 0:
            torch.rand(1)


class Contrasts(Net):
    def training_step(self, batch, batch_idx):
        every = self.all_gather(self(batch[0]), sync_grads=True)
        return every.square().mean()


class Transforms(Net):
    def forward(self, x, extra=True):
        return super().forward(torch.cdist(self.first.weight[:1], x).mT + x)


def go_wrong(kind):
    module = {"reads": Reads, "draws": Draws, "transforms": Transforms, "contrasts": Contrasts}[
        kind
    ]()
    loader = None if kind == "reads" else DataLoader(samples(), 12)
    trainer = one_trainer(strategy="tensor_parallel", strategy_options=LAYERS, devices=2)
    trainer.fit(module, loader)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reads", r"ranks that have one model together have other batches. Fix: "),
        ("draws", r"ranks that have one model together have other random numbers. Fix: "),
        ("contrasts", r"has ranks with parts of one model, whose gradients would be added up"),
        ("transforms", r"torch cannot compute this with parts of layers: .*cdist.* Fix: "),
    ],
)
def test_a_step_that_ranks_cannot_compute_together_is_an_error(tmp_path, kind, message):
    for rank in failed(tmp_path, go_wrong, kind):
        assert re.search(message, rank.error)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {}, "no layer is named, so each rank would have the whole model. Fix: "),
        ({"colwise": "secnd"}, {}, "colwise: Net has no part 'secnd'. Did you mean 'second'?"),
        ({"colwise": "norm"}, {}, "norm is Identity, which cannot be split. Fix: "),
        ({"colwise": "last", "size": 0}, {}, "size=0 must be above 0"),
        ({"colwise": "last", "size": 3}, {}, "2 ranks are no multiple of size=3"),
        ({"colwise": "last"}, {"precision": "16-mixed"}, "precision 16-mixed is not supported"),
        (
            {"colwise": "last"},
            {"plugins": ["compile"]},
            "callbacks[compile]: torch cannot compile",
        ),
        (
            {"colwise": "second", "rowwise": "extra"},
            {},
            "extra (rowwise) has a weight that another name splits in dimension 0",
        ),
    ],
)
def test_before_any_process_starts(options, given, message):
    with pytest.raises(gt.UsageError, match=re.escape(message)):
        one_trainer(strategy="tensor_parallel", strategy_options=options, devices=2, **given).fit(
            Net(shared=True), DataLoader(samples(), 6)
        )


@pytest.mark.parametrize("in_place", [True, False])
def test_a_part_that_the_user_has_compiled_is_refused(in_place):
    module = Net()
    if in_place:
        module.extra.compile(backend="eager")
    else:
        module.extra = torch.compile(module.extra, backend="eager")
    with pytest.raises(gt.UsageError, match=r"extra: torch cannot compile a step.*Fix: "):
        one_trainer(
            strategy="tensor_parallel", strategy_options={"colwise": "last"}, devices=2
        ).fit(module, DataLoader(samples(), 6))


def test_the_plan_counts_the_data_of_each_model_once():
    options = {"colwise": "last", "size": 2}
    trainer = one_trainer(strategy="tensor_parallel", strategy_options=options, devices=4)
    plan = replace(trainer.plan, loader_batch_size=6)
    assert plan.global_batch == 12
    assert plan.notes == {"model": "2 ranks have one model together, and see the same batches"}
