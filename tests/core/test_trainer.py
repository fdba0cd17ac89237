"""Trainer: its checks, its plugins, its attributes, and its tear-down."""

import copy
import pickle
import sys

import pytest
import torch
from small_models import (
    EvalNet,
    Loggers,
    Net,
    Pretend,
    assert_equal,
    fit,
    loader,
    trainer,
)

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import Callback

# --- attributes -----------------------------------------------------------------------------------


def test_attributes_after_fit():
    one = fit(EvalNet(), val=loader(), max_epochs=2)
    assert (one.global_step, one.current_epoch, one.num_training_batches) == (12, 2, 6)
    assert one.callback_metrics == one.logged_metrics
    assert set(one.callback_metrics) == {"val_loss"}
    for metrics in (one.callback_metrics, one.logged_metrics):
        value = metrics["val_loss"].item()  # as a tensor has it
        assert type(value) is float
        assert value == metrics["val_loss"] == one.run.metrics["val_loss"]
    assert one.run.command == "fit"


# --- the module, attached and detached ------------------------------------------------------------


def test_outside_a_run():
    net = Net()
    assert net.device == torch.device("cpu")
    assert (net.global_step, net.current_epoch, net.global_rank, net.local_rank) == (0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = net.trainer
    with pytest.raises(RuntimeError, match="only while a Trainer runs"):
        net.all_gather(torch.ones(1))
    assert Net().to("meta").device == torch.device("meta")


def test_a_module_without_a_trainer_has_none():
    net = Net()
    assert not hasattr(net, "trainer")
    assert getattr(net, "trainer", None) is None
    fit(net)
    assert hasattr(net, "trainer")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'layer'"):
        _ = net.layer


@pytest.mark.parametrize(
    "how",
    [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 3))],
    ids=["script", "trace"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trained_module_can_be_compiled_by_torch_jit(how):
    net = EvalNet()
    fit(net, val=loader())
    assert torch.equal(how(net)(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_inside_and_after_a_run():
    class Inside(Net):
        seen = None

        def on_train_start(self):
            self.seen = (
                self.trainer,
                self.device,
                self.all_gather({"x": [torch.ones(2)]})["x"][0].shape,
            )

    net = Inside()
    one = fit(net)
    assert net.seen == (one, torch.device("cpu"), (1, 2))
    assert net.trainer is one


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_trained_module_have_equal_weights_and_train_alike(how):
    net = EvalNet()
    fit(net, val=loader())
    same = how(net)
    assert_equal(net, same)
    with pytest.raises(RuntimeError, match="not attached"):
        _ = same.trainer
    fit(net)
    fit(same)
    assert_equal(net, same)


def test_a_copy_made_during_a_run_leaves_the_run_behind():
    class Copies(Net):
        def on_train_epoch_end(self):
            self.copied = copy.deepcopy(self)

    net = Copies()
    fit(net)
    assert_equal(net.copied.layers, net.layers)
    with pytest.raises(RuntimeError, match="not attached"):
        _ = net.copied.trainer


# --- DataModule -----------------------------------------------------------------------------------


class Data(gt.DataModule):
    batch_size = 4

    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls

    def prepare_data(self):
        self.calls.append("data prepare_data")

    def setup(self, stage):
        assert self.trainer is not None
        self.calls.append(f"data setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"data teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return loader(8)

    def val_dataloader(self):
        return loader(8)

    test_dataloader = predict_dataloader = val_dataloader


class Told(EvalNet):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def on_fit_start(self):
        self.calls.append("on_fit_start")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_datamodule_hooks_in_order(command):
    calls = []
    getattr(trainer(), command)(Told(calls), datamodule=Data(calls))
    run = ["train_dataloader", "on_fit_start"] if command == "fit" else []
    set_up = ["data prepare_data", "prepare_data", f"data setup {command}", f"setup {command}"]
    assert calls == [*set_up, *run, f"teardown {command}", f"data teardown {command}"]


def test_teardown_after_an_error():
    class Broken(Told):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    calls = []
    net = Broken(calls)
    with pytest.raises(ZeroDivisionError):
        trainer().fit(net, datamodule=Data(calls))
    assert calls[-2:] == ["teardown fit", "data teardown fit"]
    with pytest.raises(RuntimeError, match="only while a Trainer runs"):
        net.all_gather(torch.ones(1))


def test_a_datamodule_can_be_pickled_after_a_run():
    data = Data()
    fit(EvalNet(), data)
    assert pickle.loads(pickle.dumps(data)).trainer is None


@pytest.mark.parametrize(
    ("train", "datamodule", "words"),
    [(None, 3, "datamodule=3"), (Data(), Data(), "two DataModules")],
    ids=["no DataModule", "two"],
)
def test_wrong_datamodules(train, datamodule, words):
    with pytest.raises(UsageError, match=words):
        trainer().fit(Net(), train, datamodule=datamodule)


# --- checks before anything starts ----------------------------------------------------------------


class NoStep(gt.Module):
    def configure_optimizers(self):
        return None


class Misspelt(NoStep):
    def trainingstep(self, batch, batch_idx):
        return batch


class NoOptimizers(gt.Module):
    def training_step(self, batch, batch_idx):
        return batch


def never(method):
    return type("Never", (Net,), {method: lambda self, *args: None})()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (NoStep(), "NoStep has no training_step"),
        (Misspelt(), "Did you mean 'training_step'"),
        (NoOptimizers(), "NoOptimizers has no configure_optimizers"),
        (torch.nn.Linear(1, 1), r"Linear is a plain nn.Module, and optimizer=None"),
        (None, "NoneType is not a geartrain.Module"),
        *(
            (never(method), rf"Never.{method} would never be called.*{instead}")
            for method, instead in {
                "clip_gradients": "configure_gradient_clipping",
                "predict_epoch_end": "predict",
            }.items()
        ),
    ],
)
def test_modules_that_cannot_be_run(module, words):
    calls = []
    with pytest.raises(UsageError, match=words):
        trainer().fit(module, datamodule=Data(calls))
    assert calls == []  # nothing was started


def test_evaluation_needs_no_optimizers():
    class Evaluates(gt.Module):
        def test_step(self, batch, batch_idx):
            self.log("one", 1.0)

    assert trainer().test(Evaluates(), loader()) == [{"one": 1.0}]


# --- fast_dev_run ---------------------------------------------------------------------------------


def test_fast_dev_run_tries_a_few_batches_of_everything_and_writes_nothing(tmp_path):
    net = EvalNet()
    one = trainer(
        fast_dev_run=3,
        max_epochs=9,
        num_sanity_val_steps=2,
        output=tmp_path / "run",
        val_check_interval=0.5,
    )
    assert one.output is None
    one.fit(net, loader(), loader())
    assert (one.global_step, one.current_epoch) == (3, 1)
    assert net.seen == [("validate", i, 0) for i in range(3)]
    one.test(net, loader())
    assert len(net.seen) == 6
    assert len(one.predict(net, loader())) == 3
    assert not (tmp_path / "run").exists()


# --- plugins --------------------------------------------------------------------------------------

FILE = """
from geartrain import hookimpl

seen = []

class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @hookimpl
    def on_step_end(self, run):
        self.count += 1
        seen.append(self.count)
"""

FUNCTIONS = """
from geartrain import hookimpl

seen = []

@hookimpl
def on_step_end(run):
    seen.append(run.step)
"""


@pytest.fixture
def file(tmp_path, monkeypatch, request):
    """Return a function that writes a plugin's file; its modules are removed after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(text):
        path = tmp_path / "plugin_of_a_test.py"
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if name == "plugin_of_a_test":
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "suffix", "options", "seen"),
    [
        (FILE, ":Counter", {"Counter": {"start": 10}}, [11, 12, 13, 14, 15, 16]),
        (FILE, "", {"plugin_of_a_test": {"start": 20}}, [21, 22, 23, 24, 25, 26]),
        (FUNCTIONS, "", {}, [1, 2, 3, 4, 5, 6]),
    ],
    ids=["named class with an option", "option by the file's name", "functions"],
)
def test_a_plugin_from_a_file(file, text, suffix, options, seen):
    fit(plugins=f"{file(text)}{suffix}", plugin_options=options)
    assert sys.modules["plugin_of_a_test"].seen == seen


def test_plugins_as_object_and_class():
    steps = []

    class Counts:
        @hookimpl
        def on_step_end(self, run):
            steps.append(run.step)

    fit(plugins=[Counts(), Loggers])
    fit(plugins=Counts)
    assert steps == [1, 2, 3, 4, 5, 6] * 2
    assert [choice.name for choice in trainer(plugins=[Counts, Loggers()]).plan.plugins] == [
        "Counts",
        "Loggers",
    ]


def test_options_for_a_plugin_that_is_not_chosen_are_refused(file):
    with pytest.raises(UsageError, match=r"'csv'.*not among the chosen plugins"):
        trainer(plugin_options={"csv": {"path": "x"}})
    with pytest.raises(UsageError, match="takes no options"):
        trainer(plugins=str(file(FUNCTIONS)), plugin_options={"plugin_of_a_test": {"start": 1}})


def test_an_unknown_option_of_a_file_names_the_nearest(file):
    with pytest.raises(UsageError, match="Did you mean 'start'"):
        trainer(plugins=str(file(FILE)), plugin_options={"plugin_of_a_test": {"strat": 1}})


# --- errors and teardown --------------------------------------------------------------------------


class Watch:
    """Records the calls of on_exception and of teardown."""

    def __init__(self):
        self.calls, self.errors = [], []

    @hookimpl
    def on_exception(self, error):
        self.calls.append("on_exception")
        self.errors.append(error)

    @hookimpl(wrapper=True)
    def teardown_process_group(self):
        self.calls.append("teardown_process_group")
        return (yield)

    @hookimpl(wrapper=True)
    def teardown_device(self):
        self.calls.append("teardown_device")
        return (yield)


class Broken(Exception):
    pass


def breaking(hook, error=Broken):
    """A plugin that raises in one hook."""

    def wrapper(self):
        raise error("by the plugin")
        yield

    def event(self):
        raise error("by the plugin")

    is_event = hook.startswith("on_")
    return type(
        "Breaks", (), {hook: hookimpl(event) if is_event else hookimpl(wrapper=True)(wrapper)}
    )()


ALL = ["teardown fit", "data teardown fit", "teardown_process_group", "teardown_device"]


@pytest.mark.parametrize(
    ("hook", "torn_down", "error"),
    [
        ("setup_device", ["teardown_device"], Broken),
        ("setup_process_group", ["teardown_process_group", "teardown_device"], Broken),
        *(
            (hook, ALL, Broken)
            for hook in (
                *("shard_dataloader", "wrap_model", "wrap_optimizer", "on_run_start"),
                *("on_validation_start", "step", "forward", "on_epoch_end", "on_run_end"),
            )
        ),
        ("on_step_end", ALL, KeyboardInterrupt),
    ],
)
def test_an_error_in_any_phase_tears_down_and_names_the_plugin(hook, torn_down, error):
    watch = Watch()
    with pytest.raises(error) as caught:
        trainer(plugins=[watch, breaking(hook, error)], num_sanity_val_steps=1).fit(
            Told(watch.calls), datamodule=Data(watch.calls)
        )
    assert watch.calls[-len(torn_down) - 1 :] == ["on_exception", *torn_down]
    assert watch.errors == [caught.value]
    assert caught.value.__notes__ == [f"raised in hook {hook!r} of Breaks"]


def test_success_tears_down_too_without_on_exception():
    watch = Watch()
    fit(plugins=[watch])
    assert watch.calls == ["teardown_process_group", "teardown_device"]


class TeardownFails(Net):
    def teardown(self, stage):
        raise Broken("in teardown")


def test_an_error_in_teardown_does_not_keep_the_rest_from_tearing_down():
    watch, net = Watch(), TeardownFails()
    with pytest.raises(Broken, match="in teardown"):
        fit(net, plugins=[watch])
    assert watch.calls[-2:] == ["teardown_process_group", "teardown_device"]
    with pytest.raises(RuntimeError, match="only while a Trainer runs"):
        net.all_gather(torch.ones(1))


def test_an_error_in_teardown_does_not_hide_the_first_one():
    watch = Watch()
    with pytest.raises(ZeroDivisionError) as caught:
        fit(TeardownFails(), plugins=[watch, breaking("on_epoch_end", ZeroDivisionError)])
    assert any("Broken: in teardown" in note for note in caught.value.__notes__)
    assert watch.calls == ["on_exception", *ALL[2:]]


@pytest.mark.parametrize("hook", ["teardown_process_group", "teardown_device"])
@pytest.mark.parametrize("failed", [False, True])
def test_an_error_in_a_teardown_hook(hook, failed):
    watch = Watch()
    plugins = [
        breaking(hook),
        *([breaking("on_epoch_end", ZeroDivisionError)] if failed else []),
        watch,
    ]
    with pytest.raises(ZeroDivisionError if failed else Broken) as caught:
        fit(plugins=plugins)
    assert watch.calls[-2:] == ["teardown_process_group", "teardown_device"]
    if failed:
        assert any("Broken: by the plugin" in note for note in caught.value.__notes__)


# --- the world ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "size", "words"),
    [
        (gt.Layout(2, 1), 1, "plan has 2 processes.*Strategy.*world of 1"),
        (gt.Layout(1, 1), 2, "plan has 1 processes.*world of 2"),
    ],
)
def test_a_world_that_differs_from_the_plan_is_refused(planned, size, words):
    strategy = type("Strategy", (Pretend,), {"planned": planned, "world": gt.World(size=size)})
    watch = Watch()
    with pytest.raises(TrainingError, match=words):
        trainer(strategy=strategy(), devices=2, plugins=[watch]).fit(Net(), loader())
    assert watch.calls[-1] == "teardown_device"


def test_the_world_of_a_launcher_that_decides_is_accepted():
    strategy = type("Launched", (Pretend,), {"planned": gt.Layout(None, 1)})
    assert fit(strategy=strategy()).world_size == 2


def test_several_processes_need_a_strategy_that_starts_them():
    class Forgets:
        @hookimpl
        def plan_processes(self):
            return gt.Layout(2, 1)

    with pytest.raises(
        UsageError, match="Forgets plans 2 processes but has no setup_process_group"
    ):
        trainer(strategy=Forgets(), devices=2).fit(Net(), loader())


def test_a_test_after_fit_reports_the_step():
    one, net = trainer(max_epochs=2), EvalNet()
    one.fit(net, loader(8))
    one.test(net, loader(8))
    assert (one.global_step, one.current_epoch) == (4, 2)
    one.fit(net, loader(8))
    assert one.global_step == 4  # a fit counts from 0


# --- methods that cannot be called ----------------------------------------------------------------


def test_a_step_that_is_none_is_no_step():
    class Nothing(EvalNet):
        validation_step = None
        training_step_end = None

    with pytest.warns(
        UserWarning,
        match="Nothing has no validation_step: its DataLoader of TensorDataset is not used",
    ):
        fit(Nothing(), val=loader())
    with pytest.raises(UsageError, match="Nothing has no validation_step, which validate needs"):
        trainer().validate(Nothing(), loader())


@pytest.mark.parametrize(
    ("name", "value"), [("on_train_start", None), ("setup", 3), ("transfer_batch_to_device", None)]
)
def test_another_method_that_is_none_is_refused(name, value):
    with pytest.raises(UsageError, match=f"Mine.{name} is {value} and no method. Fix:"):
        fit(type("Mine", (Net,), {name: value})())


def test_one_of_a_datamodule_that_is_none_is_refused():
    with pytest.raises(UsageError, match=r"Data\.setup is None and no method. Fix:"):
        trainer().fit(Net(), type("Data", (gt.DataModule,), {"setup": None})())


def taking(name, arguments, base=Net):
    """Return a module class whose method takes these arguments and does nothing."""
    return type("Mine", (base,), {name: eval(f"lambda self, {arguments}: None")})


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("training_step", "batch, batch_idx, optimizer_idx", "'optimizer_idx'.*automatic_opt"),
        ("training_step", "batch, batch_idx, hiddens", "takes 'hiddens'.*split the sequence"),
        ("training_step", "dataloader_iter", "takes 'dataloader_iter'.*Fix: use a batch: def"),
        ("training_step", "batch, batch_idx, more", r"takes \(batch, batch_idx, more\) and is"),
        ("training_step", "batch, *, batch_idx", r"Fix: def training_step\(self, batch, batch_idx"),
        ("validation_step", "a, b, c, d", r"called with \(batch, batch_idx, dataloader_idx\)"),
        ("on_train_epoch_end", "outputs", r"takes \(outputs\) and is called with \(\)"),
        ("on_train_batch_end", "outputs", r"called with \(outputs, batch, batch_idx\)"),
        ("transfer_batch_to_device", "batch, device", r"with \(batch, device, dataloader_idx\)"),
    ],
)
def test_a_method_that_takes_other_arguments_is_refused(name, arguments, words):
    mine = taking(name, arguments)
    for module in (mine, mine()):
        with pytest.raises(UsageError, match=f"Mine.{name} .*{words}"):
            trainer().check(module)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("training_step", lambda self, *arguments: self.loss(arguments[0])),
        ("training_step", lambda self, batch, batch_idx, optimizer_idx=0: self.loss(batch)),
        ("training_step", lambda self, batch, **more: self.loss(batch)),
        ("on_train_batch_start", lambda self, *arguments: None),
        ("on_train_batch_end", lambda self, outputs, batch, batch_idx, unused=0: None),
        ("on_validation_batch_end", lambda self, outputs, batch, batch_idx: None),
        ("on_fit_start", staticmethod(lambda: None)),
    ],
)
def test_a_method_that_can_be_called_is_taken(name, method):
    assert fit(type("Mine", (EvalNet,), {name: method})(), val=loader()).global_step == 6


@pytest.mark.parametrize(
    "name", ["validation_step", "on_validation_batch_start", "on_validation_batch_end"]
)
def test_a_method_that_needs_the_loaders_number_needs_several_loaders(name):
    arguments = "outputs, batch, batch_idx" if name.endswith("end") else "batch, batch_idx"
    needs = taking(name, f"{arguments}, dataloader_idx", EvalNet)
    without = taking(name, arguments, EvalNet)
    trainer().validate(needs(), [loader(), loader()])
    trainer().validate(without(), loader())
    with pytest.raises(
        TrainingError,
        match=f"Mine.{name} takes dataloader_idx, and there is one loader to validate. Fix: data",
    ):
        trainer().validate(needs(), loader())
    if name != "validation_step":
        with pytest.raises(
            TrainingError,
            match=f"Mine.{name} takes no dataloader_idx, and there are 2 loaders to validate. Fix:",
        ):
            trainer().validate(without(), [loader(), loader()])


# --- methods whose call runs nothing --------------------------------------------------------------


async def waits(*arguments): ...


def yields(*arguments):
    yield


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("training_step", waits, "is 'async def'"),
        ("setup", yields, "yields, so calling it would run nothing"),
    ],
)
def test_a_method_whose_call_runs_nothing_is_refused(name, method, words):
    with pytest.raises(UsageError, match=rf"Mine\.{name} {words}.*Fix:"):
        fit(type("Mine", (Net,), {name: method})())


def test_so_is_one_of_a_datamodule_or_a_callback():
    with pytest.raises(UsageError, match=r"Data\.prepare_data"):
        trainer().fit(Net(), type("Data", (gt.DataModule,), {"prepare_data": waits})())
    with pytest.raises(UsageError, match=r"Mine\.on_train_start"):
        trainer(callbacks=[type("Mine", (Callback,), {"on_train_start": yields})()])


def test_loaders_may_be_generators():
    class Generates(Net):
        def train_dataloader(self):
            yield from loader()

    one = trainer()
    one.fit(Generates())
    assert one.global_step == 6
