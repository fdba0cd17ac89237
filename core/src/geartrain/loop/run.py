"""Run and World: the state that every hook gets."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from geartrain.errors import TrainingError, UsageError
from geartrain.errors.distributions import import_from
from geartrain.loop.ranks import RankCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store
    from torch.optim import Optimizer

    from geartrain.checkpoint.checkpoints import InitialCheckpoint
    from geartrain.checkpoint.training_state import Resumed
    from geartrain.data.sources import DataSource
    from geartrain.data.stage import Stage
    from geartrain.hooks.manager import Hooks
    from geartrain.launch.cluster import ClusterEnvironment
    from geartrain.loop.optimizers import Schedule
    from geartrain.loop.step_forwarder import StepForwarder
    from geartrain.metrics.store import MetricStore
    from geartrain.module.module import DataModule, Module
    from geartrain.plan import Plan
    from geartrain.trainer import Trainer


@dataclass(frozen=True, slots=True)
class World:
    """The position of this process among the others. Ranks count from 0."""

    #: Among all processes.
    rank: int = 0
    size: int = 1
    #: Among the processes of this node.
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    #: Among those that see different data. Ranks that have parts of one model see the same.
    data_rank: int = 0
    data_size: int = 1


def _no_stages() -> dict[str, Stage]:
    from geartrain.data.stage import Stage  # imports torch

    return defaultdict(Stage)


def _never(run: Run) -> bool:
    """No plugin asks for a validation."""
    return False


def _do_nothing(*_: object) -> None:
    """Do nothing: no process watches this one, and no scheduler reads a metric."""


@dataclass(slots=True, eq=False)
class LoopState:
    """The state that the loop shares with few others; it may change without notice."""

    #: The source of the loaders of each stage.
    source: DataSource = field(init=False)
    #: The checkpoint that the run loads.
    start: InitialCheckpoint | None = None
    #: ``StepForwarder(module)`` before ``wrap_model``; evaluation calls it.
    unwrapped: StepForwarder = field(init=False)
    #: The function for each step method, which the default ``forward`` calls.
    step_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    #: Functions of plugins, called between ``prepare_data`` and ``setup``.
    before_setup: list[Callable[[], None]] = field(default_factory=list)
    #: Batches done in earlier epochs.
    batches_seen: int = 0
    #: Called at each flush and at the end of an epoch in which validation may come: True on all
    #: ranks to validate there. A plugin sets it in ``on_train_start``.
    validation_is_due: Callable[[Run], bool] = _never
    #: The epoch and its batches done at the last validation, also one before a checkpoint.
    validated: tuple[int, int] | None = None
    #: The random state before the newest validation of the fit.
    before_validation: Any = None
    #: Batches of the epoch whose step is done; in ``on_train_batch_end`` more than ``batch_idx``.
    stepped: int = 0
    #: The newest result of ``training_step``; ``None`` between epochs.
    step_output: Any = None
    #: ``Weights`` of geartrain-callbacks if the losses of this fit have weights, otherwise
    #: ``False``; ``None`` before the first loss.
    weights: Any = None
    #: True if the optimizer computes the loss itself, as LBFGS does.
    needs_closure: bool = False
    #: Steps the schedulers that read a metric; called after each step with ``""``, or
    #: ``"validation"`` if one ended there, and at the end of an epoch with ``"epoch"``.
    step_plateaus: Callable[[Run, str], None] = _do_nothing
    #: The object that the module's ``manual_backward`` and the like call. The plugin
    #: ``manual_optimisation`` sets it in ``on_run_start`` of a ``fit`` in mode ``"manual"``.
    manual: Any = None
    #: The newest value of each metric that was reported or read; ``metrics`` also has newer values.
    reported: dict[str, float] = field(default_factory=dict)
    #: The random state at the beginning of the running epoch.
    epoch_start: dict[str, Any] | None = None
    #: The position where the run resumes, in its first epoch; otherwise ``None``.
    resumed: Resumed | None = None
    #: A checkpoint in memory from which ``fit`` resumes, before any file; the same on all ranks. A
    #: strategy whose ranks may change sets it in ``setup_process_group``.
    memory_checkpoint: dict[str, Any] | None = None
    #: The class of the error that ended the run, or the name of the signal; otherwise ``None``.
    failure: str | None = None
    #: Called with the error that ends the run, before plugins and modules tear down. ``launch``
    #: sets it if another process watches this rank.
    report_failure: Callable[[BaseException], None] = _do_nothing
    #: Called after plugins and modules have torn down, before this process leaves the group.
    #: ``launch`` sets it, as above.
    report_teardown: Callable[[], None] = _do_nothing


@dataclass(slots=True, eq=False)
class Run:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``: the argument of every hook."""

    #: The decisions before anything started; frozen.
    plan: Plan
    #: The callers: ``run.hooks.barrier(run=run)``. Frozen after set-up. A hook without
    #: implementation does nothing.
    hooks: Hooks
    #: The user's module, never wrapped.
    module: Module
    #: The Trainer, or the Session in mode ``"session"``.
    trainer: Trainer
    #: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
    command: str
    #: The code that does backward and steps: ``"automatic"``, the loop; ``"manual"``, the module's
    #: ``training_step``; ``"session"``, the user's own loop, without epochs and stages.
    mode: str = "automatic"
    #: The running stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or
    #: ``"sanity_check"``.
    stage: str = "train"
    #: The place of this process among the launcher's; ``None`` if it is alone.
    cluster: ClusterEnvironment | None = None
    #: A new store that every rank of this run reaches; ``None`` if this process is alone.
    store: Store | None = None
    #: The run's folder, or ``None``.
    output: Path | None = None
    #: The wrapped ``StepForwarder(module)``; only the ``forward`` hook calls it.
    model: nn.Module | None = None
    #: The optimizers, wrapped by ``wrap_optimizer``.
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Schedule] = field(default_factory=list)
    #: This rank's device; set by ``setup_device``.
    device: torch.device = field(init=False)
    world: World = field(default_factory=World)
    #: The common work of the ranks, besides the collectives among the hooks.
    coordinator: RankCoordinator = field(default_factory=RankCoordinator)
    #: Optimizer steps done; in manual optimisation, batches.
    step: int = 0
    #: Epochs done; while one runs, its number from 0.
    epoch: int = 0
    #: Batches done in this epoch, before accumulation.
    batch_idx: int = 0
    #: The index of the loader that is iterated.
    dataloader_idx: int = 0
    #: The batch of the running step method; ``None`` between batches.
    batch: Any = None
    #: The logged values since the last flush, and the values that were reported.
    logs: MetricStore = field(init=False)
    #: By name: ``"train"``, ``"validate"``, ``"test"``, ``"predict"``. A stage has no loaders if
    #: the command does not need them.
    stages: dict[str, Stage] = field(default_factory=_no_stages)
    #: True if this rank has no more batches and repeats one, so that collectives match. Outputs and
    #: logged values are dropped meanwhile.
    repeating: bool = False
    #: May be set on any rank; takes effect on all ranks at the next flush.
    should_stop: bool = False
    #: What few rooms of core, and few plugins of geartrain's own, share.
    loop: LoopState = field(default_factory=LoopState)

    def __copy__(self) -> Run:
        same: Run = object.__new__(type(self))
        for name in self.__slots__:
            if hasattr(self, name):  # some are set only once the run is set up
                setattr(same, name, getattr(self, name))
        same.loop = copy.copy(self.loop)
        return same

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a run before its start. Another process makes the hooks itself."""
        names = ("plan", "module", "trainer", "command", "output", "step", "epoch", "mode")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trainer = state["trainer"]
        hooks = trainer._setup.hooks(state["module"], state["command"], state["mode"])
        Run.__init__(self, hooks=hooks, **state)
        trainer._run = self

    def reset(self) -> None:
        """Reset this run, so that ``launch`` can call its worker again, with other ranks.

        The module keeps its weights; ``fit`` resumes from ``memory_checkpoint``.
        """
        cluster, loop, state = self.cluster, self.loop, self.__getstate__()
        if self.command == "fit":
            state |= {"step": 0, "epoch": 0}
        self.__setstate__(state)
        self.cluster, self.loop.report_failure = cluster, loop.report_failure
        self.loop.report_teardown = loop.report_teardown

    def note_failure(self, error: BaseException) -> None:
        """Set ``failure``. The error itself would keep the memory of its frames."""
        self.loop.failure = getattr(error, "signal_name", "") or type(error).__name__

    @property
    def current_stage(self) -> Stage:
        """The loaders of the running stage; a sanity check uses those to validate."""
        return self.stages["validate" if self.stage == "sanity_check" else self.stage]

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every logged metric on this rank.

        Reading it reads the values since the last flush, so the CPU waits for the GPU, but no rank
        waits for another. A metric with ``sync_dist`` that no flush has reduced yet has this rank's
        own value: call ``run.logs.refresh(name)`` on every rank to reduce it.
        """
        if hasattr(self, "logs"):  # before set-up nothing can be logged
            self.logs.read()
        return self.loop.reported

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value from a hook; the options are those of :meth:`geartrain.Module.log`."""
        self.logs.log(name, value, **options)

    def to_device(self, batch: Any) -> Any:
        """Return a batch on ``run.device``, moved by the module's transfer hooks."""
        from geartrain.data.loaders import transfer

        return transfer(self, batch)

    def remake_loaders(
        self, epoch: int, stages: Sequence[str], random: dict[str, Any] | None = None
    ) -> None:
        """Make loaders again, as those of an epoch. Every rank calls this.

        Args:
            epoch: the ``current_epoch`` that the methods of the module or DataModule see.
            stages: ``"train"``, and ``"validate"`` if wanted.
            random: the random state to restore before, from ``run.loop.epoch_start``.
        """
        from geartrain.loop.stages import remake_loaders

        remake_loaders(self, epoch, stages, random)

    def reset_logs(self) -> None:
        """Begin with a new store of logged values, before the first is logged."""
        from geartrain.metrics.store import MetricStore

        self.logs = MetricStore(self)

    def join_processes(self) -> None:
        """Let this process join the others: set ``world`` and ``coordinator``.

        Raises:
            TrainingError: the world has not the planned size.
        """
        world = self.hooks.setup_process_group(run=self)
        owner = self.hooks.owner("setup_process_group")
        label = owner.label if owner else "geartrain"
        if not isinstance(world, World):
            hint = "return geartrain.World(rank, size, local_rank, local_size, node_rank)"
            raise TrainingError(f"{label}: setup_process_group returned {world!r}. Fix: {hint}")
        k = self.plan.layout.model_parallel_size
        self.world = replace(world, data_rank=world.rank // k, data_size=world.size // k)
        planned = self.plan.processes
        if planned is not None and world.size != planned:
            message = f"the plan has {planned} processes, but setup_process_group of {label} made a"
            hint = "let the strategy join all of them, or devices=1"
            raise TrainingError(f"{message} world of {world.size}. Fix: {hint}")
        if world.size > 1:
            self.coordinator = self.hooks.make_coordinator(run=self)

    @contextmanager
    def torn_down(
        self, owners: Sequence[Module | DataModule] = ()
    ) -> Iterator[list[Callable[..., Any]]]:
        """Yield a list of functions that undo, to call in reverse order, also after an error.

        An error is first reported to plugins. ``teardown`` of ``owners`` is called if the module
        was set up.
        """
        from geartrain.loop.stages import end_all_workers

        undo: list[Callable[..., Any]] = []
        failures: list[BaseException] = []
        try:
            yield undo
        except BaseException as error:
            failures.append(error)
            self.note_failure(error)
            self.hooks.explain(error)
            self.loop.report_failure(error)
            _guard(failures, partial(self.hooks.on_exception, run=self, error=error))
        for owner in owners:
            if self.module._run is self:
                _guard(failures, partial(owner.teardown, self.command))
        _guard(failures, partial(end_all_workers, self))
        if self.world.size > 1:  # the wrapper may own the process group: free it before
            self.model, self.loop.step_functions = None, {}
        self.loop.report_teardown()
        for teardown in reversed(undo):
            _guard(failures, partial(teardown, run=self))
        self.module._attach(None)
        if failures:
            raise failures[0]

    def make_optimizers(self) -> list[Optimizer]:
        """Call ``configure_optimizers``; set the schedulers, and return the optimizers unwrapped.

        Raises:
            UsageError: it returned none of its forms.
        """
        from geartrain.loop.optimizers import read_optimizers
        from geartrain.loop.shortcuts import put_off_compiler

        put_off_compiler()
        optimizers, self.schedulers = read_optimizers(self.module.configure_optimizers())
        if any(schedule.reduce_on_plateau for schedule in self.schedulers):
            plateaus = import_from("geartrain_callbacks.plateaus", "ReduceLROnPlateau in fit")
            self.loop.step_plateaus = plateaus.step_plateaus
        return optimizers

    def wrap_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Set the optimizers, each wrapped by the hook ``wrap_optimizer``.

        Raises:
            UsageError: one computes the loss itself, as LBFGS, and the loop steps others too.
        """
        from geartrain.loop.optimizers import wants_closure

        needing = [type(optimizer).__name__ for optimizer in optimizers if wants_closure(optimizer)]
        if needing and len(optimizers) > 1 and self.mode == "automatic":
            message = f"{needing[0]} needs a closure and must be the only optimizer"
            raise UsageError(f"{message}. Fix: return it alone, or optimize manually")
        self.loop.needs_closure = bool(needing)
        self.optimizers = [self.hooks.wrap_optimizer(run=self, optimizer=o) for o in optimizers]

    def parameters_of_step(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters, by name, whose gradients the next step uses.

        In manual optimisation and in a Session these are the optimizer's own: other gradients may
        still be scaled, or belong to another loss.
        """
        from geartrain.loop.optimizers import parameters_of

        named = dict(self.module.named_parameters())
        if self.mode == "automatic":
            return named
        stepped = set(parameters_of(self.optimizers))
        return {name: parameter for name, parameter in named.items() if parameter in stepped}

    def backward(self, loss: torch.Tensor) -> None:
        """Call the hook ``backward``, and explain why a loss has none.

        Raises:
            TrainingError: the loss has ``requires_grad=False``, or is not one number.
        """
        try:
            self.hooks.backward(run=self, loss=loss)
        except RuntimeError as error:  # not checked before: the check would cost every step
            if not loss.requires_grad:
                raise TrainingError(
                    f"the loss of {type(self.module).__name__}.training_step has "
                    "requires_grad=False, so training cannot change a parameter. Fix: compute the "
                    "loss from parameters with requires_grad=True, without .detach(), .item() or "
                    "torch.no_grad()"
                ) from error
            if loss.numel() != 1:
                message = f"the loss must be one number, and has the shape {list(loss.shape)}"
                raise TrainingError(f"{message}. Fix: return its .mean() or .sum()") from error
            raise

    def checkpoint(self, epochs: int, weights_only: bool = False) -> dict[str, Any]:
        """Return the contents of a checkpoint. Every rank calls this, and rank 0's is saved.

        It has weights, counters, the additions of the module's ``on_save_checkpoint`` and, during
        ``fit``, everything that is needed to resume.

        Args:
            epochs: epochs done: ``run.epoch`` within an epoch, one more in ``on_epoch_end``.
            weights_only: leave out what is needed to resume.
        """
        from geartrain.checkpoint.checkpoints import checkpoint_state

        return checkpoint_state(self, epochs, weights_only)

    def save_checkpoint(self, state: dict[str, Any], path: Path) -> None:
        """Save a checkpoint and call ``on_checkpoint_saved``. Every rank calls this, with one path.

        If a plugin writes the file, the checkpoint names it: the plugin may be needed to read it.

        Raises:
            TrainingError: it could not be written.
        """
        from geartrain.checkpoint.checkpoints import save_checkpoint_file

        save_checkpoint_file(self, state, path)


def _guard(failures: list[BaseException], action: Callable[[], Any]) -> None:
    """Call a clean-up. Collect its error, and add it as a note to the first one."""
    try:
        action()
    except Exception as error:
        failures.append(error)
        if failures[0] is not error:
            failures[0].add_note(f"and then, while tearing down: {type(error).__name__}: {error}")
