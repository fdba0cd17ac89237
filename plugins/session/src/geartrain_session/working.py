"""What each process of a Session does around the loop, and which plugins that loop can serve."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from geartrain import Module, Run, UsageError, seed_everything
from geartrain.plugin_api import (
    Hooks,
    LoadedPlugin,
    MetricStore,
    ModuleHooks,
    always_tear_down,
    check_ranks_agree,
    hyperparameters,
    init_process_group,
    overridden,
)

if TYPE_CHECKING:
    from geartrain_session.models import SessionModel

#: Hooks around what only a Trainer's loop knows: a Session does not fire them.
NOT_FIRED = ("on_epoch_start", "on_epoch_end", "on_validation_start", "on_validation_end")
#: Nor these, around a whole step or micro-batch; a strategy's ``micro_step`` is called where ``no_backward_sync`` is open.
NOT_AROUND = ("step", "micro_step")


class Models(Module):
    """Stands for the user's module in a Session's run: it holds the models that were set up."""


def check_hooks(hooks: Hooks, parts: Iterable[LoadedPlugin]) -> None:
    """Refuse plugins that wait for what a Session does not fire; one that is ``errors_are_warnings`` is warned of.

    Raises:
        UsageError: with the plugin, the hooks and the way out.
    """
    for part in parts:
        choice = part.info
        if choice.distribution == "geartrain":
            continue
        watched = NOT_FIRED + NOT_AROUND if choice.kind == "plugin" else ("step",)
        missed = [hook for hook in watched if choice in hooks.implementers(hook)]
        what = f"{choice.label}: a Session never calls {', '.join(missed)}: epochs, validation and whole steps are your loop's"
        if set(missed) & set(NOT_AROUND) or (missed and not getattr(part.plugin, "errors_are_warnings", False)):
            raise UsageError(f"{what}. Fix: do in the loop what it does, or use geartrain.Trainer")
        if missed:
            warnings.warn(what, stacklevel=4)


@contextmanager
def process_context(run: Run, local_rank: int) -> Iterator[None]:
    """Set up this process; at the end report what was logged and tear down, the latter also after an error."""
    session: Any = run.trainer
    with always_tear_down(run, ()) as undo:
        undo.append(run.hooks.teardown_device)
        run.device = run.hooks.setup_device(run=run, local_rank=local_rank)
        undo.append(run.hooks.teardown_process_group)
        init_process_group(run)
        undo.append(session._let_go)
        # A batch of no one's: what plugins log belongs to steps.
        run.logs, run.module_hooks, run.batch = MetricStore(run), ModuleHooks(run.module), ()
        check_ranks_agree(run)
        run.hooks.freeze()
        session._run = run
        yield
        session._finish()


def release_models(run: Run, runs: Sequence[Run], models: Sequence[SessionModel]) -> None:
    """Give models back as they were; what wraps them goes before the process group, see ``always_tear_down``."""
    for model in models:
        if isinstance(model.module, Module):
            model.module._run = None
    for each in (run, *runs):
        each.model, each.step_functions, each.optimizers = None, {}, []
    run.module = Models()
    if dist.is_available() and dist.is_initialized():
        gc.collect()


def attach(run: Run, models: Sequence[SessionModel]) -> None:
    """Let the run's module be that of the newest model's, or hold all where there are several."""
    module: Any = models[-1].module
    if isinstance(module, Module):
        module._run, module._trainer = run, run.trainer
        names = [name for name in dir(Module) if name.startswith(("on_", "transfer_")) and overridden(module, name)]
        if names:
            warnings.warn(f"{type(module).__name__}.{', '.join(names)}: a Session never calls it. Fix: call it in the loop", stacklevel=3)
    run.module = module if len(models) == 1 else as_one_module(*(model.module for model in models))


def as_one_module(*modules: Any) -> Any:
    """The module that hooks see: a geartrain Module itself, else one that holds them."""
    if len(modules) == 1 and isinstance(modules[0], Module):
        return modules[0]
    whole = Models()
    for i, module in enumerate(modules):
        whole.add_module(f"model{i}", module)
    return whole


def hyperparameters_of(models: Sequence[SessionModel]) -> dict[str, Any]:
    """The plan's hyperparameters: what geartrain Modules were made with; of several models under the names that :func:`holding` gives."""
    found: dict[str, Any] = {}
    for i, model in enumerate(models):
        prefix = f"model{i}." if len(models) > 1 else ""
        if isinstance(model.module, Module):
            found.update({prefix + name: value for name, value in hyperparameters(model.module).items()})
    return found


class FunctionWorker:
    """The worker of ``launch(function)``: the whole of a run in one process."""

    def __init__(self, run: Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run, self.function, self.args, self.kwargs = run, function, args, kwargs

    @property
    def pickled_arguments(self) -> dict[str, Any]:
        """What it takes along to another process, by the names under which its user knows it."""
        args = {f"argument {i} of launch": value for i, value in enumerate(self.args, start=1)}
        return {"the function of launch": self.function, **args, **{f"{name}= of launch": value for name, value in self.kwargs.items()}}

    def __call__(self, local_rank: int) -> Any:
        with process_context(self.run, local_rank):
            seed = self.run.plan.options.seed
            if seed is not None:
                seed_everything(seed)  # a fresh process has not heard of it
            return self.function(self.run.trainer, *self.args, **self.kwargs)


class ScriptWorker:
    """The worker of ``launch()``: it sets this process up and returns; the caller is then inside, until :meth:`stack` ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inside: ExitStack | None = None
        self._around = ExitStack()

    def __call__(self, local_rank: int) -> None:
        with ExitStack() as inside:
            inside.enter_context(process_context(self._run, local_rank))
            self._inside = inside.pop_all()

    def keep(self, around: ExitStack) -> None:
        """Take what a launcher has opened around this rank."""
        self._around = around

    def stack(self) -> ExitStack:
        """What ends the run.

        Raises:
            UsageError: nothing was set up in this process.
        """
        if self._inside is None:
            label = self._run.plan.strategy.label
            raise UsageError(f"{label} works in other processes than this one. Fix: session.launch(train), and then train(session)")
        whole = ExitStack()
        whole.push(self._around)
        whole.push(self._inside)
        return whole
