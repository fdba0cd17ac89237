"""Names in users' classes: misspelt ones are errors, other frameworks' hooks are warnings."""

import inspect
import logging
import re
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from small_models import Net, fit, loader, trainer

import geartrain as gt
from geartrain import UsageError, hookimpl
from geartrain.callbacks import Callback
from geartrain.hooks.spelling import DATA, MODULE, STATE, nearly, on_methods
from geartrain_callbacks.callback import CALLED

from ..contract_fixtures import accelerator, hooks_of, part, strategy

OF_A_MODULE = frozenset(MODULE | on_methods())


def does(self, *arguments): ...


def refused(run, name, meant):
    with pytest.raises(UsageError, match=rf"its {name}\b.*Did you mean '{meant}'\? Fix: "):
        run()


def module(**attributes):
    fit(type("Mine", (Net,), attributes)())


def data_module(**attributes):
    methods = {"train_dataloader": lambda self: loader(), **attributes}
    trainer().fit(Net(), datamodule=type("Data", (gt.DataModule,), methods)())


def callback(**attributes):
    trainer(callbacks=[type("Mine", (Callback,), {"on_fit_start": does, **attributes})()])


@pytest.mark.parametrize(
    ("run", "name", "value", "meant"),
    [
        (module, "on_training_epoch_end", does, "on_train_epoch_end"),
        (module, "on_val_epoch_end", does, "on_validation_epoch_end"),
        (module, "on_trainepoch_end", does, "on_train_epoch_end"),
        (module, "validaton_step", does, "validation_step"),
        (module, "val_step", does, "validation_step"),
        (module, "val_data_loader", does, "val_dataloader"),
        (module, "validation_step_ends", does, "validation_step_end"),
        (module, "setpu", does, "setup"),
        (module, "configure_optimisers", does, "configure_optimizers"),
        (data_module, "val_dataloder", does, "val_dataloader"),
        (data_module, "set_up", does, "setup"),
        (callback, "on_val_end", does, "on_validation_end"),
        (callback, "load_state_dic", does, "load_state_dict"),
        (callback, "same_on_all_rank", True, "same_on_all_ranks"),
    ],
)
def test_misspelt_attribute(run, name, value, meant):
    refused(lambda: run(**{name: value}), name, meant)


def test_misspelt_attribute_of_an_object():
    class Mine(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimisation = False

    refused(lambda: fit(Mine()), "automatic_optimisation", "automatic_optimization")


@pytest.mark.parametrize(
    ("has", "lacks"), [("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")]
)
def test_half_a_state_of_a_plugin(has, lacks):
    says = rf"Mine: it has {has} and no {lacks}, so no checkpoint would hold its state\. Fix: add"
    with pytest.raises(UsageError, match=says):
        trainer(plugins=[type("Mine", (), {"on_step_end": on_step_end, has: does})()])


def test_a_callback_that_only_loads_a_state():
    says = r"callback Mine: it has load_state_dict and no state_dict, so no checkpoint would hold"
    with pytest.raises(UsageError, match=says):
        trainer(callbacks=[type("Mine", (Callback,), {"load_state_dict": does})()])


@hookimpl
def on_step_end(self): ...


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("errors_are_warnings", True),
        ("replaces", {"backward"}),
        ("forward", hookimpl(lambda self: None)),
    ],
)
def test_attributes_for_plugins_only_on_a_callback(name, value):
    mine = type("Mine", (Callback,), {"on_fit_start": does, name: value})
    with pytest.raises(
        UsageError,
        match=rf"callback Mine\.{name} is for a plugin, and would be ignored here\. Fix: ",
    ):
        trainer(callbacks=[mine()])


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("errors_are_warning", True, "errors_are_warnings"),
        ("replace", {"backward"}, "replaces"),
        ("must_owns", ["backward"], "must_own"),
        ("hookspec", types.ModuleType("specs"), "hookspecs"),
        ("state_dicts", does, "state_dict"),
        ("on_epoch_ends", does, "on_epoch_end"),
        ("more_option", does, "more_options"),
    ],
)
def test_misspelt_attribute_of_a_plugin(name, value, meant):
    mine = type("Mine", (), {"on_step_end": on_step_end, name: value})
    says = rf"^acme\[Mine\]: .*its {name}\b.*Did you mean '{meant}'\? Fix: "
    with pytest.raises(UsageError, match=says):
        hooks_of(part(mine(), distribution="acme"))


@pytest.mark.parametrize(
    "name",
    ["steps", "launched", "sep", "log_metric_of", "on_steps"],
)
def test_names_of_a_plugins_own(name):
    hooks_of(strategy(type("Mine", (), {"on_step_end": on_step_end, name: does})()))


@pytest.mark.parametrize(
    ("of", "name", "value", "meant"),
    [
        (strategy, "capabilites", {"multi_node": False}, "capabilities"),
        (strategy, "need_function", True, "needs_function"),
        (accelerator, "indexd", False, "indexed"),
        (accelerator, "select_device", does, "select_devices"),
        (accelerator, "devices_count", does, "device_count"),
    ],
)
def test_misspelt_attribute_of_a_strategy_or_an_accelerator(of, name, value, meant):
    refused(lambda: hooks_of(of(type("Mine", (), {name: value})())), name, meant)


def test_misspelt_function_of_a_plugin_file():
    module = types.ModuleType("my_hooks")
    exec("def on_step_ends(run): ...", vars(module))
    module.on_epoch_end = hookimpl(lambda: None)
    refused(lambda: hooks_of(module), "on_step_ends", "on_step_end")


# --- no misspellings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["on_train_epoch_end_custom", "training_step2", "text_dataloader", "last_step"],
)
def test_names_of_the_users_own(name):
    fit(type("Mine", (Net,), {name: does})())


def test_a_method_that_the_class_calls_is_the_users_own():
    class Mine(Net):
        def train_step(self, batch):
            return self.loss(batch)

        def training_step(self, batch, batch_idx):
            return next(self.val_step(batch) for _ in range(1))

        def val_step(self, batch):
            return self.train_step(batch)

    fit(Mine())


def test_values_that_geartrain_would_not_read_are_the_plugins_own():
    class Mine:
        require = frozenset({"backward"})
        errors_are_warning = "words"

        def __init__(self):
            self.replace = True

        on_step_end = on_step_end

        @hookimpl(specname="on_epoch_end")
        def on_epoch_ends(self): ...

    hooks_of(Mine())


def _public_names():
    modules = [
        *(torch.nn, torch.optim, torch.optim.lr_scheduler, torch.utils.data, logging, threading),
        pytest.importorskip("torchmetrics"),
        pytest.importorskip("sklearn.pipeline"),
    ]
    classes = [one for module in modules for one in vars(module).values() if inspect.isclass(one)]
    return {name for cls in classes for name in dir(cls) if name[0] != "_"}


def test_names_of_other_libraries_are_no_misspellings():
    """Lightning's mixins have no near-miss of a hook, as an example of ordinary names."""
    examples = Path(__file__).parents[3].glob("examples/*.py")
    names = _public_names() | {
        name for file in examples for name in re.findall(r"def ([a-z]\w+)", file.read_text())
    }
    hooks = frozenset(hooks_of().names) | STATE
    assert len(names) > 200
    for known in (OF_A_MODULE, DATA, frozenset(CALLED) | STATE, hooks):
        assert {name: meant for name in names if (meant := nearly(name, known)) is not None} == {}


# --- other frameworks -----------------------------------------------------------------------------


def test_hooks_of_other_frameworks_are_warned_of():
    with pytest.warns(
        UserWarning,
        match=r"Mine: its on_epoch_begin is a method of a callback of Keras, and nothing calls it",
    ):
        fit(type("Mine", (Net,), {"on_epoch_begin": does})())
    with pytest.warns(
        UserWarning, match=r"Data: its training_step is a method of a Module or a Callback"
    ):
        trainer().fit(
            Net(),
            type(
                "Data",
                (gt.DataModule,),
                {"train_dataloader": lambda self: loader(), "training_step": does},
            )(),
        )


@pytest.mark.parametrize("name", ["on_log", "on_train_batch_begin", "validaton_step"])
def test_hooks_of_other_frameworks_on_a_plugin_are_warned_of(name):
    mine = type("Mine", (), {"on_step_end": on_step_end, name: does})
    with pytest.warns(UserWarning, match=rf"Mine: its {name} is a method of .*@hookimpl"):
        trainer(plugins=[mine()])


def test_users_own_methods_raise_no_warning():
    class Mine(Net):
        def on_epoch_begin(self): ...

        def on_train_epoch_start(self):
            self.on_epoch_begin()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(
            Mine(),
            plugins=[
                type("Logs", (), {"on_step_end": on_step_end, "setup": does, "on_new_line": does})()
            ],
        )
