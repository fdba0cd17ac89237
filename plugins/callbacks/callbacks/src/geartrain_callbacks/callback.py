"""PyTorch Lightning's callbacks: classes with ``on_train_start(self, trainer, pl_module)`` etc.

The set-up of a run registers the methods as hookimpls: they are called after those of plugins, in
the order of the callbacks, and before the module's own methods of the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain import Run, TrainingError, UsageError, World, hookimpl
from geartrain.plugin_api import (
    Hooks,
    LoadedPlugin,
    PluginInfo,
    Registry,
    check_attributes,
    nearest,
    not_plain,
    write_instead,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from geartrain import Module, Trainer

_STATE = ("state_dict", "load_state_dict")
#: The types of options that tell callbacks apart, and lists and dicts of them.
_PLAIN = (bool, int, float, str, type(Path()))

#: Lightning's packages.
_LIGHTNING = ("lightning", "pytorch_lightning")

#: Methods of Lightning's callbacks that geartrain would never call -> the replacement.
NOT_CALLED = {
    "on_before_optimizer_setup": "configure_optimizers of the module",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "on_init_start": "__init__",
    "on_init_end": "__init__",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
}


class Callback:
    """Base class of callbacks written for PyTorch Lightning: override the methods you need.

    Pass callbacks as ``Trainer(callbacks=[MyCallback()])``. ``trainer`` is the
    :class:`geartrain.Trainer`, ``pl_module`` the user's module.

    Callbacks are called in the order given, each before the module's own hook of the same name;
    ``on_exception`` and ``teardown`` in reverse order. A callback with state defines
    ``state_dict()`` and ``load_state_dict(state)``; ``state_dict()`` alone is only saved.
    """

    def as_plugin(self) -> Adapter:
        """Return the plugin that calls this callback; ``Trainer(callbacks=[...])`` asks for it."""
        return Adapter(self)

    #: The running run, from ``setup`` to ``teardown``.
    _geartrain_run: Run | None = None

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log one number, as :meth:`geartrain.Module.log` with the same options.

        Raises:
            RuntimeError: outside a run.
        """
        if self._geartrain_run is None:
            message = f"self.log({name!r}) works only in hooks, from setup to teardown"
            raise RuntimeError(f"{type(self).__name__}: {message}")
        self._geartrain_run.module.log(name, value, **options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values with the options of :meth:`log`.

        Args:
            dictionary: values by name; also a torchmetrics ``MetricCollection``.
        """
        if self._geartrain_run is None:
            self.log(", ".join(dictionary), None)  # raises
        else:
            self._geartrain_run.module.log_dict(dictionary, **options)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Called in each process after ``prepare_data``, before ``setup`` of the modules.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Called in each process after the module's ``teardown``, even after an error."""

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Called if the run failed or was interrupted."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called on each rank before a checkpoint from which a ``fit`` can resume is written.

        Add tensors and plain values to ``checkpoint``, whose weights are under ``"model"``. Rank
        0's is written.
        """

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Called on each rank if a ``fit`` resumes, before the module loads its weights."""

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after the set-up of ``fit``."""

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called at the end of ``fit``."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before the sanity check."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after each epoch and its validation, before its metrics are reported."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Called before each training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each training batch.

        Args:
            outputs: the return value of ``training_step``, detached.
        """

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: Module, optimizer: Optimizer
    ) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Any) -> None:
        """Called before each backward."""

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after each backward.

        Gradients may not be reduced over ranks yet: change them in ``on_before_optimizer_step``.
        """

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: Module, optimizer: Optimizer
    ) -> None:
        """Called before each optimizer's step; gradients are reduced and clipped."""

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before validation, including the sanity check."""

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after validation, when its metrics are known."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before validation's first batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after validation's last batch, before its metrics are reported."""

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each validation batch."""

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before testing."""

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after testing."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each test batch."""

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before prediction."""

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each batch to predict."""


#: The methods that a callback may override.
CALLED = tuple(
    name
    for name, thing in vars(Callback).items()
    if inspect.isfunction(thing) and name not in ("as_plugin", "log", "log_dict")
)


#: Methods that few callbacks have -> the hookimpls that call them.
_OF_CHECKPOINTS = {
    "on_save_checkpoint": "_add_to_checkpoint",
    "on_load_checkpoint": "_read_from_checkpoint",
}


class _Caller:
    """The hookimpls that call a callback's methods. Their names leave the hooks' own names free."""

    #: What follows the name of its state in a checkpoint. After ``;`` it may change.
    state_suffix = ""
    _is_set_up = False
    #: The callback's attributes from ``setup`` to ``teardown``, for its ``log``.
    _lent: Mapping[str, Any] = {}

    @property
    def _called(self) -> Any:
        """The callback."""
        return self

    @property
    def _methods(self) -> dict[str, Callable[..., Any]]:
        """The methods that the callback overrides."""
        callback = self._called
        base = _base_of(callback)
        return {m: getattr(callback, m) for m in CALLED if _overrides(callback, base, m)}

    @hookimpl(wrapper=True, specname="setup_process_group")
    def _setup_callback(self, run: Run) -> Generator[None, World, World]:
        world = yield
        run.loop.before_setup.append(partial(self._set_up, run))
        return world

    def _set_up(self, run: Run) -> None:
        self._is_set_up = True
        if isinstance(self._called, Callback):
            self._lent = {"_geartrain_run": run}
        else:
            self._lent = {"log": run.module.log, "log_dict": run.module.log_dict}
        vars(self._called).update(self._lent)
        self._call(run, "setup", run.command)
        methods = {n: _as_module_hook(run, n, method) for n, method in self._methods.items()}
        info = PluginInfo(type(self._called).__name__, "plugin", None, None, "callbacks=")
        run.hooks.add_methods(methods, info)

    @hookimpl(wrapper=True, specname="save_checkpoint")
    def _add_to_checkpoint(self, run: Run, state: dict[str, Any]) -> Generator[None, None, None]:
        if "fit" in state:
            before = dict(state)
            self._call(run, "on_save_checkpoint", state)
            for name, value in state.items():
                if value is not before.get(name) and (kind := not_plain(value)) is not None:
                    raise TrainingError(
                        f"{type(self._called).__name__}.on_save_checkpoint put {kind} under "
                        f"{name!r}, which could not be read again. Fix: tensors, numbers, strings, "
                        "and lists, tuples and dicts of them"
                    )
        return (yield)

    @hookimpl(wrapper=True, specname="load_checkpoint")
    def _read_from_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        state = yield
        if run.loop.start is not None and run.loop.start.resumes:
            self._call(run, "on_load_checkpoint", state)
        return state

    @hookimpl(specname="on_exception")
    def _inform_callback(self, run: Run, error: BaseException) -> None:
        self._call(run, "on_exception", error)

    @hookimpl(wrapper=True, specname="teardown_process_group")
    def _teardown_callback(self, run: Run) -> Generator[None, None, None]:
        try:
            if self._is_set_up:
                self._call(run, "teardown", run.command)
        finally:
            for name in self._lent:
                vars(self._called).pop(name, None)
            self._is_set_up, self._lent = False, {}
            yield

    def __dir__(self) -> list[str]:
        """Hide the hookimpls of methods that the callback does not have."""
        hidden = {hookimpl for name, hookimpl in _OF_CHECKPOINTS.items() if not self._has(name)}
        return [name for name in super().__dir__() if name not in hidden]

    def _has(self, name: str) -> bool:
        called = self._called
        return _overrides(called, _base_of(called), name)

    def _call(self, run: Run, name: str, *arguments: Any) -> None:
        if name in (methods := self._methods):
            methods[name](run.trainer, run.module, *arguments)


class Adapter(_Caller):
    """The plugin that calls one callback's methods.

    Args:
        callback: a :class:`Callback`, or a third-party object of Lightning's class of this name.

    Raises:
        UsageError: the callback has a method that would never be called, or overrides none.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        name = type(callback).__name__
        for method in dir(callback):
            if method in Hooks.plugin_attributes or _is_hookimpl(callback, method):
                raise UsageError(
                    f"callback {name}.{method} is for a plugin, and would be ignored here. "
                    "Fix: pass plugins=[...] instead of a Callback"
                )
        has = [name for name in _STATE if self._has(name)]
        _check(callback, {*CALLED, *_STATE} if has != ["state_dict"] else set(CALLED))
        self.state_suffix = _state_suffix(callback)
        if not (self._methods or has):
            raise UsageError(
                f"callback {name} overrides no method of geartrain.callbacks.Callback, "
                "so it would do nothing"
            )
        if has:
            self.state_dict = callback.state_dict
            self.load_state_dict = getattr(callback, "load_state_dict", _ignore)
            self.same_on_all_ranks = getattr(callback, "same_on_all_ranks", False)

    @property
    def _called(self) -> Any:
        return self.callback


def _state_suffix(callback: Any) -> str:
    """Return the metric, and after ``;`` other options, by which states are told apart."""
    values, metric = vars(callback), ""
    if isinstance(values.get("monitor"), str):
        metric = f"({', '.join(str(values[n]) for n in ('monitor', 'mode') if n in values)})"
    options = {
        name: str(values[name]) if isinstance(values[name], Path) else values[name]
        for name, parameter in inspect.signature(type(callback)).parameters.items()
        if name not in ("monitor", "mode") and values.get(name) is not parameter.default
        if name in values and not_plain(values[name], _PLAIN) is None
    }
    return metric + "".join(f"; {name}={value!r}" for name, value in options.items())


def _ignore(state: Any) -> None:
    """Load nothing: the callback's state is only saved."""


def parts(registry: Registry, callbacks: Any) -> list[LoadedPlugin]:
    """Return the plugins of ``callbacks``.

    Raises:
        UsageError: an object is no callback, or has methods that would never be called.
    """
    is_one = isinstance(callbacks, str) or not isinstance(callbacks, Iterable)
    given = [callbacks] if is_one else list(callbacks)
    return [_part(registry, callback) for callback in given]


def _part(registry: Registry, callback: Any) -> LoadedPlugin:
    reason, hint = "callbacks=[...]", "use an object of a subclass of geartrain.callbacks.Callback"
    if isinstance(callback, str):
        hint = f"plugins=[{callback!r}]"
    elif not isinstance(callback, type):
        if hasattr(callback, "as_plugin"):
            return registry.adopt("plugin", callback, reason)
        if (adapter := adapt(callback)) is not None:
            info = PluginInfo(type(callback).__name__, "plugin", None, None, reason)
            return LoadedPlugin(info, adapter)
        if Hooks.has_hookimpls(callback):
            return registry.adopt("plugin", callback, reason)
    raise UsageError(f"callbacks={callback!r}: it is no callback. Fix: {hint}")


def with_callbacks_of(setup: Any, module: Module) -> Any:
    """Return a trainer's setup with the callbacks of ``module.configure_callbacks``.

    They replace callbacks of the same class, and stay in the trainer.

    Raises:
        UsageError: an object is no callback.
    """
    added = parts(setup.registry, module.configure_callbacks() or ())
    classes = {type(_callback(part)) for part in added}
    kept = [part for part in setup.parts if type(_callback(part)) not in classes]
    infos = [part.info for part in kept if part.info in setup.plan.plugins]
    plan = replace(setup.plan, plugins=(*infos, *(part.info for part in added)))
    return replace(setup, parts=(*kept, *added), plan=plan)


def _callback(part: LoadedPlugin) -> Any:
    return getattr(part.plugin, "callback", part.plugin)


def adapt(callback: Any) -> Adapter | None:
    """Return the plugin that calls a third-party callback written for Lightning.

    Returns:
        ``None`` for an object whose class does not extend ``Callback`` of an installed Lightning.

    Raises:
        UsageError: the callback is Lightning's own, which needs Lightning's trainer.
    """
    cls = type(callback)
    bases = [base for base in cls.__mro__ if base.__name__ == "Callback"]
    if not any(base.__module__.partition(".")[0] in _LIGHTNING for base in bases):
        return None
    if cls.__module__.partition(".")[0] in _LIGHTNING:
        message = f"callbacks={cls.__name__}(...): it is Lightning's own"
        instead = write_instead("geartrain.callbacks", cls.__name__).removeprefix(". Write: ")
        instead = instead or f"geartrain.callbacks.{cls.__name__}"
        raise UsageError(f"{message}. Fix: use {instead}")
    return Adapter(callback)


class PluginCallback(Callback, _Caller):
    """Base class of callbacks that do their work in hookimpls.

    A subclass may override the methods of :class:`Callback`, too. They are called besides the
    hookimpls, so ``super().on_train_epoch_end(trainer, pl_module)`` does nothing. A hook that has
    the name of such a method is implemented under another name, with ``specname``.
    """

    errors_are_warnings = False

    def as_plugin(self) -> Any:
        """Check the methods, and return the callback: it is a plugin itself."""
        for name in CALLED:
            if _is_hookimpl(self, name):
                raise UsageError(
                    f"callback {type(self).__name__}.{name} has @hookimpl, and is a method of "
                    f"callbacks here. Fix: @hookimpl(specname={name!r}) and the name _{name}; or "
                    f"take out @hookimpl, and take the arguments of Callback.{name}"
                )
        _check(self, {*CALLED, *_STATE})
        self.state_suffix = _state_suffix(self)
        if self._methods:  # errors of the user's methods end the run, as in every callback
            self.errors_are_warnings = False
        return self

    def __dir__(self) -> list[str]:
        """Hide what is no hookimpl of this plugin: geartrain looks for hookimpls here."""
        # The two are hooks of plugins, too.
        hidden = set(CALLED)
        if not self._methods:
            hidden.update(name for name in vars(_Caller) if _is_hookimpl(self, name))
        return [name for name in super().__dir__() if name not in hidden]


def _check(callback: Any, methods: set[str]) -> None:
    """Refuse methods that would never be called.

    Args:
        methods: those that are; with both of a state, one of them alone is refused.

    Raises:
        UsageError: there is one.
    """
    label, base = f"callback {type(callback).__name__}", _base_of(callback)
    check_attributes(callback, label, methods, ["same_on_all_ranks"], base, may_yield=False)
    classes = type(callback).__mro__
    for method in object.__dir__(callback):
        if not method.startswith("on_") or not _overrides(callback, base, method):
            continue
        if method in NOT_CALLED:
            raise UsageError(
                f"{label}.{method} would never be called. Use instead: {NOT_CALLED[method]}"
            )
        # A hookimpl that is overridden without @hookimpl: Hooks says so.
        overrides_hook = any(hasattr(vars(c).get(method), "geartrain_impl") for c in classes)
        if method not in CALLED and not overrides_hook:
            raise UsageError(f"{label}.{method} would never be called. {nearest(method, CALLED)}")


def _base_of(callback: Any) -> type:
    return next(cls for cls in reversed(type(callback).__mro__) if cls.__name__ == "Callback")


def _is_hookimpl(callback: Any, name: str) -> bool:
    return hasattr(inspect.getattr_static(callback, name, None), "geartrain_impl")


def _overrides(callback: Any, base: type, name: str) -> bool:
    found = inspect.getattr_static(callback, name, None)
    if isinstance(found, property) or hasattr(found, "geartrain_impl"):  # do not call a property
        return False
    method = getattr(callback, name, None)
    inherited = getattr(base, name, None)
    return callable(method) and getattr(method, "__func__", method) is not inherited


def _as_module_hook(run: Run, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback's method as a function with the arguments of the module's hook."""
    trainer = run.trainer
    module = run.module
    parameters = inspect.signature(method).parameters.values()
    evaluates = name.endswith(("_batch_start", "_batch_end")) and not name.startswith("on_train_")
    full = 6 if name.endswith("_end") else 5
    takes_all = len(parameters) >= full or any(p.kind is p.VAR_POSITIONAL for p in parameters)

    def call(*arguments: Any) -> None:
        given = (trainer, module, *arguments)
        if evaluates and takes_all and len(given) < full:
            given = (*given, 0)  # Lightning gives dataloader_idx even with one loader
        method(*given)

    return call
