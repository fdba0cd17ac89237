"""Run and World: the state that is handed to every hook."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geartrain.loop.ranks import OneRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store
    from torch.optim import Optimizer

    from geartrain.checkpoint.training_state import Resumed
    from geartrain.hooks.manager import Hooks
    from geartrain.launch.cluster import ClusterEnvironment
    from geartrain.loop.optimizers import Schedule
    from geartrain.loop.step_forwarder import ModuleHooks, StepForwarder
    from geartrain.metrics.store import MetricStore
    from geartrain.module.module import Module
    from geartrain.plan import Plan
    from geartrain.trainer import Trainer


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands among the others. Every number counts from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0


@dataclass(slots=True)
class Stage:
    """The loaders of one stage, and for each of them how many batches are used."""

    #: After ``shard_dataloader``.
    loaders: list[Iterable[Any]] = field(default_factory=list)
    #: Batches of one pass on this rank, after limits; ``None`` if a loader has no length.
    batches: list[int | None] = field(default_factory=list)
    #: The most batches that any rank has: so many times every rank calls the step in evaluation.
    max_batches: list[int | None] = field(default_factory=list)
    #: True if ranks must agree at each batch whether another follows: some rank's loader has no length.
    lengths_unknown: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Stage, (
            [],
            self.batches,
            self.max_batches,
            self.lengths_unknown,
        )  # loaders stay in their process


def _report_nothing(*_: object) -> None:
    """Do nothing: no process watches this one."""


@dataclass(slots=True, eq=False)
class Run:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``, as hooks see it."""

    #: The decisions before anything started; frozen.
    plan: Plan
    #: The callers: ``run.hooks.barrier(run=run)``. Frozen after set-up; a hook without implementation does nothing.
    hooks: Hooks
    #: The user's module, never wrapped.
    module: Module
    trainer: Trainer
    #: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``: the caller's command.
    command: str
    #: What does backward and steps: ``"automatic"``, the loop; ``"manual"``, the module's ``training_step``; ``"session"``, the user's own
    #: loop, without epochs and stages.
    mode: str = "automatic"
    #: What runs now: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"``.
    stage: str = "train"
    #: This process among the others, as the launcher says; ``None`` if it is alone.
    cluster: ClusterEnvironment | None = None
    #: A fresh store that every rank of this run reaches; ``None`` where this process is alone.
    store: Store | None = None
    #: Called with the error that ends the run, before plugins and modules tear down. Set by ``launch`` for a rank that is watched.
    report_failure: Callable[[BaseException], None] = _report_nothing
    #: Called when plugins and modules have torn down: this process only has to leave the others. Set by ``launch`` likewise.
    report_teardown: Callable[[], None] = _report_nothing
    #: The run's folder, or ``None``.
    output: Path | None = None
    #: The wrapped ``StepForwarder(module)``; only the ``forward`` hook calls it.
    model: nn.Module | None = None
    #: ``StepForwarder(module)`` as it was before ``wrap_model``: what evaluation calls.
    unwrapped: StepForwarder = field(init=False)
    #: The function for each step method, which the default ``forward`` calls.
    step_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Schedule] = field(default_factory=list)
    device: torch.device = field(init=False)
    world: World = field(default_factory=World)
    #: The common work of the ranks, beside the collectives among the hooks.
    ranks: OneRank = field(default_factory=OneRank)
    #: What plugins want called between ``prepare_data`` and ``setup`` of data module and module.
    before_setup: list[Callable[[], None]] = field(default_factory=list)
    #: Optimizer steps done; in manual optimisation, batches.
    step: int = 0
    #: Epochs done; while one runs, its number from 0.
    epoch: int = 0
    #: Batches done in this epoch, before accumulation.
    batch_idx: int = 0
    #: Batches done in earlier epochs.
    batches_seen: int = 0
    #: The loader that is iterated now, from 0.
    dataloader_idx: int = 0
    #: The batch that is in a step method now; ``None`` between batches.
    batch: Any = None
    #: The newest result of ``training_step``; ``None`` between epochs.
    step_output: Any = None
    #: True if the optimizer computes the loss itself, as LBFGS does.
    needs_closure: bool = False
    #: The target of the module's ``manual_backward`` and the like: in mode ``"manual"``, from ``on_run_start`` of a ``fit`` on. The plugin
    #: ``manual_optimisation`` sets it.
    manual: Any = None
    #: The newest value of each metric that was reported or read; ``metrics`` also has values that were logged since then.
    reported: dict[str, float] = field(default_factory=dict)
    logs: MetricStore = field(init=False)
    #: The module's own hooks that are overridden, each a bound method or ``None``.
    module_hooks: ModuleHooks = field(init=False)
    #: By name, ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``; empty if the command does not need its loaders.
    stages: dict[str, Stage] = field(default_factory=lambda: defaultdict(Stage))
    #: True if this rank has run out of batches and repeats one, so that collectives match; its outputs and logs are thrown away.
    repeating: bool = False
    #: Where the random generators stood as the running epoch began.
    epoch_start: dict[str, Any] | None = None
    #: Where a run resumes, in its first epoch; ``None`` after it, and in other runs.
    resumed: Resumed | None = None
    #: A checkpoint in memory from which ``fit`` resumes, before any file. Set in ``setup_process_group`` by a strategy whose
    #: ranks come and go; all ranks have the same.
    memory_checkpoint: dict[str, Any] | None = None
    #: May be set on any rank; takes effect on all ranks at the next flush.
    should_stop: bool = False

    def __copy__(self) -> Run:
        same: Run = object.__new__(type(self))
        for name in self.__slots__:
            if hasattr(self, name):  # some are set only once the run is set up
                setattr(same, name, getattr(self, name))
        return same

    def __getstate__(self) -> dict[str, Any]:
        """A run that has not begun, as it goes to another process; its hooks are made there, from the trainer's parts."""
        return {
            name: getattr(self, name)
            for name in ("plan", "module", "trainer", "command", "output", "step", "epoch", "mode")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        trainer = state["trainer"]
        Run.__init__(self, hooks=trainer.hooks_for(state["module"], state["command"]), **state)
        trainer._run = self

    def again(self) -> None:
        """Make this run as it was before ``launch`` called its worker, which may then be called once more, as by a strategy whose ranks
        come and go. The module keeps its weights: ``memory_checkpoint`` is where ``fit`` resumes."""
        cluster, reports, state = (
            self.cluster,
            (self.report_failure, self.report_teardown),
            self.__getstate__(),
        )
        if self.command == "fit":
            state |= {"step": 0, "epoch": 0}
        self.__setstate__(state)
        self.cluster, (self.report_failure, self.report_teardown) = cluster, reports

    @property
    def current_stage(self) -> Stage:
        """The loaders of what runs now; a sanity check reads those to validate."""
        return self.stages["validate" if self.stage == "sanity_check" else self.stage]

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every logged metric on this rank; values logged since the last flush are read now.

        The CPU waits for the GPU here, but no rank waits for another. So a metric with ``sync_dist`` that no flush has reduced yet is this
        rank's own: ``run.logs.refresh(name)``, called on every rank, reduces it.
        """
        if hasattr(self, "logs"):  # before set-up nothing can be logged
            self.logs.read()
        return self.reported

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value from a hook; the options are those of :meth:`geartrain.Module.log`."""
        self.logs.log(name, value, **options)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to ``run.device``, through the module's ``transfer_batch_to_device`` if it is overridden."""
        from geartrain.data.loaders import transfer

        return transfer(self, batch)
