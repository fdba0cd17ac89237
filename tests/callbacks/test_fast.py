"""``fast``: the same bits as without it, in a run, over a resume, on ranks; and what it leaves."""

import itertools
from functools import partial

import pytest
import torch
from small_models import Net, assert_equal, fit, loader, trainer
from threads import on_threads
from torch import nn
from torch.optim import lr_scheduler

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import EMA
from geartrain_callbacks import fast

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(Adam, lr=0.01, betas=(0.5, 0.7)),
    "Adam decay": partial(Adam, lr=0.01, weight_decay=0.1),
    "AdamW": partial(AdamW, lr=0.01, eps=1e-3),
}
#: Have no states to join, or options with other operations.
NOT_JOINED = {
    "SGD": partial(SGD, lr=0.1),
    "SGD decay": partial(SGD, lr=0.1, weight_decay=0.01),
    "SGD maximize": partial(SGD, lr=0.1, momentum=0.9, maximize=True),
    "Adam amsgrad": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam maximize": partial(Adam, lr=0.01, maximize=True),
    "Adam tensor": partial(Adam, lr=torch.tensor(0.01)),
    "Adam fused": partial(Adam, lr=0.01, fused=True),
    "Adam foreach": partial(Adam, lr=0.01, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


class Deep(Net):
    """Has parameters of many sizes, one of which is too long to be joined."""

    def __init__(self, optimizer=OPTIMIZERS["Adam"]):
        super().__init__(optimizer)
        torch.manual_seed(1)
        sizes = [3, 17, 300, 257, 33, 1]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*[m for layer in layers for m in (layer, nn.Tanh())][:-1])


class Keeps:
    """Keeps the optimizer's state, and the longest tensor that the last step used."""

    def __init__(self):
        self.longest = 0

    @gt.hookimpl
    def on_step_end(self, run):
        steps = [f for p in run.hooks.parts for f in getattr(p.plugin, "_flat", {}).values()]
        pieces = [piece for flat in steps for piece in flat.pieces]
        self.longest = max([piece.size for piece in pieces if piece.is_joined], default=0)

    @gt.hookimpl
    def on_train_end(self, run):
        (self.optimizer,) = run.optimizers
        self.state = self.optimizer.state_dict()


def run(make, *plugins, **options):
    module, keeps = make(), Keeps()
    fit(module, plugins=[keeps, *plugins], max_epochs=3, seed=1, **options)
    return module, keeps


def same_state(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return all(map(same_state, a, b))
    return a == b


def assert_same(make, *plugins, joined=True, **options):
    expected, was = run(make, *(plugin() for plugin in plugins), **options)
    found, keeps = run(make, *(plugin() for plugin in plugins), "fast", **options)
    assert joined is None or (keeps.longest > 300) == joined
    assert keeps.longest <= fast._LONGEST
    assert_equal(expected, found)
    assert same_state(keeps.state, was.state)
    for state in keeps.optimizer.state.values():  # each has its own memory again
        for value in state.values():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_bit_is_the_same(optimizer):
    assert_same(partial(Deep, optimizer))


@pytest.mark.parametrize("optimizer", NOT_JOINED.values(), ids=NOT_JOINED)
def test_every_bit_is_the_same_where_nothing_is_joined(optimizer):
    assert_same(partial(Deep, optimizer), joined=False)


class Changes(Deep):
    """Changes its optimizer's options in ways that the joined steps do not compute."""

    def on_train_epoch_start(self):
        (group,) = self.trainer.optimizers[0].param_groups
        group["maximize"] = self.current_epoch == 1
        if self.current_epoch == 2:
            group["lr"] = torch.tensor(0.02)


def test_options_that_change():
    assert_same(Changes, joined=False)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"plugins": [partial(EMA, decay=0.5)]},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"precision": "bf16-true"},
    ],
    ids=str,
)
def test_every_bit_is_the_same_with(options):
    plugins = options.pop("plugins", [])
    assert_same(Deep, *plugins, **options)


class Scheduled(Deep):
    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
        optimizer = AdamW(groups, 0.01)
        return [optimizer], [
            {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, 40), "interval": "step"}
        ]


def test_groups_and_schedulers():
    assert_same(Scheduled)


class Turns(Deep):
    """Trains other layers in the second epoch, and has a part that no loss uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def on_train_epoch_start(self):
        for parameter in self.layers[0].parameters():
            parameter.requires_grad = self.current_epoch != 1
            parameter.grad = None


def test_parameters_that_freeze_and_unfreeze():
    assert_same(Turns)


class Tied(Deep):
    def __init__(self):
        super().__init__()
        self.layers.append(nn.Linear(1, 1))
        self.layers[-1].bias = self.layers[-2].bias  # one parameter twice
        self.other = nn.Linear(17, 3)
        self.other.weight.data = self.layers[0].weight.data.t()  # two of one memory

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.other.weight.square().mean()


class Watches(Deep):
    """Reads its weights through a tensor that it took before the run."""

    def __init__(self):
        super().__init__()
        self.taken = [p.detach() for p in self.parameters()]

    def training_step(self, batch, batch_idx):
        assert all(map(torch.equal, self.taken, self.parameters()))
        return super().training_step(batch, batch_idx)


def test_parameters_stay_where_they_are():
    run(Watches, "fast")


def test_parameters_that_share_memory_are_not_joined():
    expected, _ = run(Tied)
    found, _ = run(Tied, "fast")
    assert_equal(expected, found)


class Replaces(Deep):
    """Sets weights and states in ways that replace their memory."""

    def on_train_epoch_start(self):
        optimizer = self.trainer.optimizers[0]
        self.layers[2].weight.data = self.layers[2].weight.data * 0.5
        optimizer.load_state_dict(optimizer.state_dict())


def test_weights_and_states_that_the_module_replaces():
    assert_same(Replaces)


class Scalars(Deep):
    """Has parameters that are one number, and have no gradient in the first step."""

    def __init__(self, optimizer=OPTIMIZERS["Adam"]):
        super().__init__(optimizer)
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(3))

    def training_step(self, batch, batch_idx):
        part = sum(self.gates) * bool(self.global_step) * 0.01
        return super().training_step(batch, batch_idx) * (part + 1)


@pytest.mark.parametrize("optimizer", [Adam, partial(SGD, momentum=0.9)])
def test_parameters_that_are_one_number(optimizer):
    assert_same(partial(Scalars, partial(optimizer, lr=0.001)))


class Exchanges(Deep):
    """Gives the optimizer another parameter in the place of one, in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            old = self.layers[2].weight
            self.layers[2].weight = nn.Parameter(old.detach() * 0.5)
            (group,) = self.trainer.optimizers[0].param_groups
            group["params"] = [self.layers[2].weight if p is old else p for p in group["params"]]


def test_a_parameter_that_is_exchanged_in_its_group():
    assert_same(partial(Exchanges, partial(SGD, lr=0.01)), joined=False)


def test_steps_of_other_ways_between_joined_steps():
    def train(*plugins):
        module = Deep()
        with gt.Session(accelerator="cpu", plugins=plugins) as session:
            _, optimizer = session.setup(module, Adam(module.parameters(), 0.01))
            for turn, batch in enumerate([*loader()] * 2):
                optimizer.zero_grad()
                session.backward(module.loss(batch))
                if turn == 3:
                    optimizer.step(lambda: torch.zeros(()))
                elif turn == 6:
                    Adam.step(optimizer)  # past the session
                else:
                    optimizer.step()
        return module

    assert_equal(train(), train("fast"))


def test_a_hook_that_is_registered_during_the_run_is_called():
    class Late(Deep):
        calls = 0

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.trainer.optimizers[0].register_step_post_hook(self.count)

        count = Hooked.count

    assert_same(Late, joined=False)
    assert run(Late, "fast")[0].calls == 12


class Hooked(Deep):
    calls = 0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.calls += 1


def test_an_optimizer_with_hooks_steps_as_before():
    assert_same(Hooked, joined=False)
    assert run(Hooked, "fast")[0].calls == 18


class Manual(Deep):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_manual_optimisation_steps_as_before_with_a_warning():
    with pytest.warns(UserWarning, match=r"fast.*Adam has stepped as without it.*Fix: leave fast"):
        assert_same(Manual, joined=False)


@pytest.mark.parametrize("first", [[], ["fast"]])
def test_a_checkpoint_of_a_run_with_or_without_it(tmp_path, first):
    whole, _ = run(Deep)
    fit(Deep(), plugins=first, max_epochs=1, seed=1, output=tmp_path)
    rest = Deep()
    second = [] if first else ["fast"]
    resumed = trainer(plugins=second, max_epochs=3, seed=1, output=tmp_path)
    resumed.fit(rest, loader(), ckpt_path="last")
    assert_equal(rest, whole)
    size = (tmp_path / "last.ckpt").stat().st_size
    fit(Deep(), max_epochs=3, seed=1, output=tmp_path / "plain")
    assert size < 1.1 * (tmp_path / "plain" / "last.ckpt").stat().st_size


def test_on_two_ranks():
    def train(*plugins):
        module = Deep()
        runner = on_threads(2, max_epochs=2, plugins=plugins, enable_progress_bar=False)[0]
        runner.fit(module, loader(batch_size=2))
        return module

    assert_equal(train(), train("fast"))


def test_in_a_session():
    def train(*plugins):
        module = Deep()
        with gt.Session(accelerator="cpu", plugins=plugins) as session:
            _, optimizer = session.setup(module, Adam(module.parameters(), 0.01))
            for batch in loader():
                optimizer.zero_grad()
                session.backward(module.loss(batch))
                optimizer.step()
        return module

    assert_equal(train(), train("fast"))


def test_mixed_precision_that_scales_is_refused():
    with pytest.raises(UsageError, match=r"optimizer_step.*Fix"):
        fit(Deep(), plugins=["fast"], precision="16-mixed")


class StepsItself:
    """A strategy that owns the step of the optimizers."""

    @gt.hookimpl
    def optimizer_step(self, optimizer):
        optimizer.step()


def test_a_strategy_that_steps_optimizers_itself_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(Deep, "setup", lambda *_: pytest.fail("the run has started"))
    with pytest.raises(UsageError, match=r"StepsItself.* steps optimizers itself.*Fix: leave fast"):
        fit(Deep(), plugins=["fast"], strategy=StepsItself())


def test_a_layout_that_keeps_changing_is_given_up(monkeypatch):
    monkeypatch.setattr(fast, "_MOST_LAYOUTS", 1)
    assert_same(Replaces, joined=False)


# --- level="rounding" -----------------------------------------------------------------------------


def rounding(monkeypatch, seconds):
    """Let each trial take these seconds, and return the list of the trials' optimizers."""
    trials = []

    def timed(optimizer, stepper):
        trials.append(optimizer)
        return seconds

    monkeypatch.setattr(fast, "time_fused", timed)
    return trials


def test_the_faster_step_is_taken_also_by_a_run_that_resumes(monkeypatch, tmp_path, capfd):
    trials = rounding(monkeypatch, (2e-4, 1e-4))
    whole, keeps = run(Deep, fast.Fast("rounding"))
    assert len(trials) == 1
    assert keeps.state["param_groups"][0]["fused"] is True
    assert "a step of Adam takes 200 µs and 100 µs if fused" in capfd.readouterr().err
    by_hand, _ = run(partial(Deep, partial(OPTIMIZERS["Adam"], fused=True)))
    assert_equal(by_hand, whole)
    fit(Deep(), plugins=[fast.Fast("rounding")], max_epochs=1, seed=1, output=tmp_path)
    rest = Deep()
    resumed = trainer(plugins=[fast.Fast("rounding")], max_epochs=3, seed=1, output=tmp_path)
    resumed.fit(rest, loader(), ckpt_path="last")
    assert len(trials) == 2
    assert_equal(rest, whole)


def test_a_fused_step_that_is_slower_is_not_taken(monkeypatch):
    rounding(monkeypatch, (1e-4, 2e-4))
    found, _ = run(Deep, fast.Fast("rounding"))
    assert_equal(found, run(Deep)[0])


@pytest.mark.parametrize("seconds", [(2e-4, 1e-4), None])
def test_rank_0_decides_for_all(monkeypatch, seconds):
    trials, groups = rounding(monkeypatch, seconds), []

    class Notes:
        @gt.hookimpl
        def on_train_end(self, run):
            groups.append(run.optimizers[0].param_groups[0]["fused"])

    options = {"max_epochs": 1, "enable_progress_bar": False}
    runner = on_threads(2, plugins=[fast.Fast("rounding"), Notes()], **options)[0]
    runner.fit(Deep(), loader(batch_size=2))
    assert groups == [True if seconds else None] * 2
    assert len(trials) == 1


def with_gradients(make, sparse=False):
    table = nn.Embedding(5, 3, sparse=sparse)
    optimizer = make(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    return table, optimizer


@pytest.mark.parametrize("make", [Adam, AdamW, SGD])
def test_a_trial_times_copies(make):
    table, optimizer = with_gradients(partial(make, lr=0.1))
    weights = table.weight.clone()
    plain, fused = fast.time_fused(optimizer, lambda copy: copy.step)
    assert plain > 0
    assert fused > 0
    assert torch.equal(weights, table.weight)
    assert optimizer.param_groups[0]["fused"] is None
    assert all("exp_avg" not in state for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("make", "sparse"),
    [
        (partial(Adam, foreach=True), False),
        (partial(Adam, fused=False), False),
        (torch.optim.RMSprop, False),
        (partial(SGD, lr=0.1), True),
        (torch.optim.SparseAdam, True),
    ],
)
def test_no_trial_where_torch_has_no_fused_step_or_the_user_has_chosen(make, sparse):
    assert fast.time_fused(with_gradients(make, sparse)[1], lambda copy: copy.step) is None


def test_no_trial_without_gradients():
    assert fast.time_fused(Adam(nn.Linear(2, 2).parameters()), lambda copy: copy.step) is None


def test_an_unknown_level_is_refused():
    with pytest.raises(UsageError, match=r"level='exakt' is unknown. Fix: 'exact' or 'rounding'"):
        fast.Fast("exakt")
