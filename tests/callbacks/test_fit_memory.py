"""``fit_memory``: a step that runs out of memory is repeated in parts, with the same gradients."""

import pytest
import torch
from several_ranks import kept_by
from small_models import Net, assert_equal, fit, loader, samples, trainer, weights
from threads import on_threads
from torch import nn

import geartrain as gt
from geartrain import TrainingError, UsageError
from geartrain.callbacks import FitMemory
from geartrain_ddp import DDPStrategy


class Fails(torch.autograd.Function):
    """Runs out of memory in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("out of memory")


START = Net()


class Limited(Net):
    """Has memory for ``most`` samples at a time."""

    fails_late = False

    def __init__(self, most=None, **options):
        super().__init__(**options)
        self.load_state_dict(START.state_dict(), strict=False)
        self.most, self.sizes, self.ended = most, [], []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", batch[0].max(), on_epoch=True, reduce_fx="max")
        if self.most is not None and self.sizes[-1] > self.most:
            if not self.fails_late:
                raise torch.OutOfMemoryError("out of memory")
            loss = Fails.apply(loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
        self.ended.append((batch_idx, len(batch[0]), loss.item()))


class Late(Limited):
    fails_late = True


def train(module, train=None, *plugins, **options):
    train = loader(22, shuffle=True) if train is None else train
    options = {"max_epochs": 2, "precision": "64-true", "seed": 1, "plugins": plugins, **options}
    return fit(module, train, **options)


def pair(cls=Limited, most=2, **options):
    """Return a module that was trained with enough memory, one without, and their trainers."""
    expected, found, plugin = cls(), cls(most), FitMemory()
    return expected, found, train(expected, **options), train(found, None, plugin, **options)


def assert_close(a, b):
    for x, y in zip(weights(a).values(), weights(b).values(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("cls", [Limited, Late])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}], ids=str
)
def test_the_gradients_are_those_of_the_whole_batch(cls, options):
    expected, found, before, after = pair(cls, **options)
    assert_close(expected, found)
    assert found.sizes[:3] == [4, 2, 2]
    assert max(found.sizes[1:]) == 2
    assert found.ended == [(i, n, pytest.approx(loss)) for i, n, loss in expected.ended]
    assert after.global_step == before.global_step
    metrics = {name: value.item() for name, value in after.callback_metrics.items()}
    assert metrics.pop("micro_batches") == 2
    assert metrics == {name: pytest.approx(v.item()) for name, v in before.callback_metrics.items()}
    assert {"loss_step", "loss_epoch", "most_step", "most_epoch"} <= metrics.keys()


@pytest.mark.parametrize(("most", "count", "parts"), [(3, 2, [3, 2]), (1, 8, [1] * 5)])
def test_parts_need_not_be_equal(most, count, parts):
    expected, found, plugin = Limited(), Limited(most), FitMemory()
    data = loader(10, batch_size=5)
    train(expected, data)
    with pytest.warns(UserWarning, match=rf"step 0 ran out of memory on rank 0.*has {count} micro"):
        train(found, data, plugin)
    assert_close(expected, found)
    assert plugin.micro_batches == count
    assert found.sizes[-len(parts) :] == parts


def test_it_is_kept_logged_and_resumed(tmp_path):
    whole = Limited(2)
    train(whole, None, FitMemory())
    first, rest = Limited(2), Limited(2)
    one = train(first, None, FitMemory(), max_epochs=1, output=tmp_path)
    assert one.callback_metrics["micro_batches"] == 2
    options = {"max_epochs": 2, "precision": "64-true", "seed": 1, "output": tmp_path}
    again = trainer(plugins=[FitMemory()], **options)
    again.fit(rest, loader(22, shuffle=True), ckpt_path="last")
    assert max(rest.sizes) == 2
    assert_equal(whole, rest)


def test_one_sample_that_does_not_fit_is_torchs_own_error():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as raised:
        train(Limited(0), None, FitMemory())
    assert "a micro-batch of one sample does not fit" in str(raised.value.__notes__)


class Opaque:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return self


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: Opaque(x), "Opaque has no tensor with a row"),
        (lambda x: [x, Opaque(x)], r"batch\[1\] is a Opaque, whose tensors cannot be split"),
        (lambda x: [x, x[:2]], r"batch\[1\] has 2 rows, but the batch has 4"),
    ],
)
def test_a_batch_that_cannot_be_split_is_one_error(make, message):
    class Fits(Net):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("out of memory")

    batches = [make(x.float()) for x, _ in loader()]
    with pytest.raises(TrainingError, match=rf"fit_memory.*out of memory, and .*{message}.*Fix: "):
        fit(Fits(), batches, plugins=[FitMemory()])


class Sums(Limited):
    def loss(self, batch):
        return super().loss(batch) * len(batch[0])


def test_a_loss_that_is_a_sum():
    expected, found = Sums(), Sums(2)
    train(expected)
    train(found, None, FitMemory(loss="sum"))
    assert_close(expected, found)
    assert found.ended == [(i, n, pytest.approx(loss)) for i, n, loss in expected.ended]
    with pytest.raises(UsageError, match=r"fit_memory.*loss='mode'.*Fix: 'mean' or 'sum'"):
        FitMemory(loss="mode")


class Outputs(Limited):
    """Returns more than the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rows": batch[0].sum(1), "name": "a"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert torch.equal(outputs["rows"], batch[0].sum(1))
        assert outputs["name"] == "a"


def test_outputs_are_those_of_the_whole_batch():
    expected, found, *_ = pair(Outputs)
    assert_close(expected, found)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda loss: None, "returned None for a part of a batch.*Fix: give samples"),
        (lambda loss: {"loss": loss, "weight": 3}, "returned a weight .*Fix: return the mean"),
        (lambda loss: {"lost": loss}, r"training_step returned a dict with \['lost'\]"),
    ],
)
def test_outputs_that_do_not_tell_the_gradients_of_a_batch(output, message):
    class Unclear(Limited):
        def training_step(self, batch, batch_idx):
            return output(super().training_step(batch, batch_idx))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    with pytest.raises(TrainingError, match=message):
        train(Unclear(2), None, FitMemory())


class Draws(Limited):
    def __init__(self, most=None):
        super().__init__(most)
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def test_a_repeated_step_draws_the_same_numbers():
    module = Draws(2)
    train(module, None, FitMemory(), limit_train_batches=1, max_epochs=1)
    assert module.sizes == [4, 2, 2]
    assert module.drawn[0] == module.drawn[1] != module.drawn[2]


class Own(DDPStrategy):
    def configure_ddp(self, run, model):
        return super().configure_ddp(run, model)


class Manual(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Manual, {}, "manual optimisation.*Fix: leave it out"),
        (lambda: Net(lambda p: torch.optim.LBFGS(p)), {}, "LBFGS, which computes several losses"),
        (Net, {"strategy": "fsdp", "devices": 2}, "fsdp.*wait for each other.*Fix: --strategy ddp"),
        (Net, {"strategy": "bagua", "devices": 2}, "bagua.*wait for each other"),
        (Net, {"strategy": Own(), "devices": 2}, "Own: ranks wait for each other"),
    ],
)
def test_refusals(module, options, message):
    with pytest.raises(UsageError, match=message):
        fit(module(), plugins=[FitMemory()], **options)


def test_two_of_them_are_refused():
    with pytest.raises(UsageError, match=r"fit_memory.* given twice.*Fix"):
        fit(plugins=[FitMemory(), FitMemory()])


def test_a_second_fit_begins_with_the_number_of_the_first():
    module, again = Limited(2), Limited(2)
    runner = train(module, None, FitMemory(), max_epochs=1)
    runner.fit(again, loader())
    assert max(again.sizes) == 2


class Compresses:
    @gt.hookimpl
    def reduce_bucket(self, bucket):
        """Compress a bucket."""


def test_a_plugin_that_reduces_buckets_of_ddp_is_refused():
    with pytest.raises(UsageError, match=r"Compresses reduces DDP's buckets.*Fix: use one without"):
        fit(strategy="ddp", devices=2, plugins=[FitMemory(), Compresses()])


def test_a_layer_in_which_ranks_wait_for_each_other_is_refused():
    module = Net()
    module.layers.append(nn.SyncBatchNorm(1))
    with pytest.raises(UsageError, match=r"wait for each other in layers\.3, a SyncBatchNorm.*Fix"):
        on_threads(2, plugins=[FitMemory()])[0].fit(module, loader())


class OfRank(Limited):
    """Runs out of memory on rank 1 alone."""

    def training_step(self, batch, batch_idx):
        self.most = 1 if self.global_rank == 1 else None
        return super().training_step(batch, batch_idx)


class LateOfRank(OfRank):
    fails_late = True


@pytest.mark.parametrize("cls", [OfRank, LateOfRank])
@pytest.mark.parametrize("first", [0, 1])
def test_one_of_several_ranks_runs_out_of_memory(cls, first):
    def run(cls, *plugins):
        module = cls()
        runner, strategy = on_threads(
            2, first, max_epochs=2, plugins=plugins, precision="64-true", seed=1
        )
        runner.fit(module, loader(batch_size=2))
        return module, strategy.runs[1].module, runner

    expected, _, before = run(Limited)
    found, other, after = run(cls, FitMemory())
    assert_close(expected, found)
    assert_equal(found, other)
    assert other.sizes[:3] == [2, 1, 1]
    per_epoch = len(expected.sizes) // 2
    assert found.sizes[:per_epoch] == [2] * per_epoch
    assert set(found.sizes[per_epoch:]) == {1}  # from then on as the other rank
    loss = "loss_epoch"
    assert after.callback_metrics[loss].item() == pytest.approx(
        before.callback_metrics[loss].item()
    )


def test_objects_of_torchmetrics_count_each_sample_once():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measures(Limited):
        def __init__(self, most=None):
            super().__init__(most)
            self.error = torchmetrics.MeanSquaredError()

        def training_step(self, batch, batch_idx):
            self.error(self(batch[0]), batch[1])
            self.log("error", self.error, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, _, before, after = pair(Measures, max_epochs=1)
    assert after.callback_metrics["error"].item() == pytest.approx(
        before.callback_metrics["error"].item(), rel=1e-5
    )


def test_a_validation_is_not_split():
    class Validates(Limited):
        def validation_step(self, batch, batch_idx):
            self.sizes.append(-len(batch[0]))

    module = Validates(2)
    fit(module, loader(), loader(), plugins=[FitMemory()])
    assert {size for size in module.sizes if size < 0} == {-4}


def test_a_batch_of_other_forms():
    class Named(Limited):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["y"]), batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    x, y = samples(24).tensors
    batches = [
        {"x": x[i : i + 4], "y": y[i : i + 4], "ids": [str(n) for n in range(i, i + 4)]}
        for i in range(0, 24, 4)
    ]
    expected, found = Named(), Named(2)
    fit(expected, batches)
    fit(found, batches, plugins=[FitMemory()])
    assert_close(expected, found)


OPTIONS = {"a batch": {}, "two batches": {"accumulate_grad_batches": 2}}


def train_by_ddp():
    """Return weights and sizes of fits with enough memory, and with too little on rank 1."""
    found = {}
    for cls in (Limited, OfRank, LateOfRank):
        for name, options in OPTIONS.items():
            module = cls()
            plugins = [] if cls is Limited else [FitMemory()]
            data = loader(batch_size=4, shuffle=True)
            options = {"max_epochs": 2, "precision": "64-true", "seed": 1, **options}
            fit(module, data, strategy="ddp", devices=2, plugins=plugins, **options)
            found[f"{cls.__name__}: {name}"] = weights(module), module.sizes
    return found


by_ddp = kept_by(train_by_ddp)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cls", ["OfRank", "LateOfRank"])
def test_one_rank_of_ddp_runs_out_of_memory(by_ddp, cls, name):
    expected, _ = by_ddp[0][f"Limited: {name}"]
    (first, sizes), (second, others) = (rank[f"{cls}: {name}"] for rank in by_ddp)
    for key, value in expected.items():
        torch.testing.assert_close(first[key], value)
        assert torch.equal(first[key], second[key])
    assert (sizes[0], others[0]) == (4, 4)
    assert others[1:4] == [2, 1, 1]


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp_spawn", "elastic"])
def test_one_rank_of_other_strategies_runs_out_of_memory(strategy):
    def run(cls, *plugins):
        module = cls()
        options = {"max_epochs": 2, "precision": "64-true", "seed": 1, "plugins": plugins}
        options["strategy_options"] = {"timeout": 60}
        return fit(module, loader(shuffle=True), strategy=strategy, devices=2, **options), module

    _, expected = run(Limited)
    after, found = run(LateOfRank, FitMemory())
    assert_close(expected, found)
    assert after.callback_metrics["micro_batches"] == 4
