"""Lightning's attributes of a Trainer that have no part in the loop.

``trainer.NAME`` finds them here. Each works before, during and after a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geartrain import Run, Trainer
from geartrain_callbacks.combined import CombinedLoader
from geartrain_callbacks.saving import save


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state of a Trainer."""

    #: The command of the running or last run: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``.
    fn: str | None
    #: The running stage, as ``run.stage``; ``None`` outside a run.
    stage: str | None
    #: ``"initializing"``, ``"running"``, ``"finished"``, or ``"interrupted"`` after an error.
    status: str

    @property
    def finished(self) -> bool:
        """True if the last run succeeded."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """True if the last run succeeded or failed."""
        return self.status in ("finished", "interrupted")


class RunningStrategy:
    """The strategy of a Trainer as callbacks use it: ``trainer.strategy.barrier()``.

    Every rank must call ``barrier``, ``broadcast``, ``all_gather`` and ``reduce_boolean_decision``.
    Outside a run they are those of one rank.

    Args:
        view: the attributes of the Trainer.
        plugin: the strategy itself.
    """

    def __init__(self, view: TrainerView, plugin: Any) -> None:
        self._view, self._trainer, self.plugin = view, view.trainer, plugin

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the Trainer, as ``world_size``, or of the strategy."""
        if name.startswith("_"):
            raise AttributeError(name)
        home = self._trainer if hasattr(type(self._trainer), name) else self.plugin
        return getattr(home, name)

    @property
    def strategy_name(self) -> str:
        """The strategy's name."""
        return self._trainer.plan.strategy.name

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks."""
        return self._trainer.world_size > 1

    @property
    def root_device(self) -> torch.device:
        """The device of this rank; the CPU before a run."""
        return getattr(self._view.run, "device", torch.device("cpu"))

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this."""
        if (run := self._view.active) is not None:
            run.hooks.barrier(run=run)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        run = self._view.active
        return obj if run is None else run.hooks.broadcast(run=run, obj=obj, src=src)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> Any:
        """Return ``[world_size, *tensor.shape]``; see :meth:`geartrain.Module.all_gather`."""
        run = self._view.active
        return tensor[None] if run is None else run.coordinator.gather(run, tensor, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if every rank decides so; with ``all=False``, if any rank does."""
        run, decisions = self._view.active, torch.tensor([decision], dtype=torch.float64)
        if run is not None:
            decisions = run.hooks.log_sync(run=run, values=decisions)
        return bool(decisions.all() if all else decisions.any())


def _of(read: Callable[[TrainerView], Any], doc: str) -> Any:
    """Return a property."""
    return property(read, doc=doc)


def _option(name: str) -> Any:
    return _of(
        lambda self: getattr(self.trainer.plan.options, name, None), f"The argument ``{name}``."
    )


def _during(stage: str) -> Any:
    return _of(lambda self: self.state.stage == stage, f"True in the stage ``{stage!r}``.")


def _loaders(stage: str) -> Any:
    doc = "The loader of this rank, a list of several, or ``None``."
    return _of(lambda self: _one_or_list(self._stage(stage)[0]), doc)


def _batches(stage: str) -> Any:
    return _of(lambda self: self._stage(stage)[1], "This rank's batches of each loader, or inf.")


def _of_run(name: str, otherwise: Any, doc: str) -> Any:
    return _of(lambda self: getattr(self.run, name, otherwise), doc)


class TrainerView:
    """Lightning's attributes of a Trainer that core does not need.

    Args:
        trainer: the Trainer.
        run: its running or last run, or ``None``.
    """

    def __init__(self, trainer: Trainer, run: Run | None) -> None:
        self.trainer, self.run = trainer, run
        #: The running run.
        self.active = run if run is not None and run.module._run is run else None

    @property
    def state(self) -> TrainerState:
        """The command, the stage and the status."""
        run, active = self.run, self.active
        if run is None:
            return TrainerState(None, None, "initializing")
        ended = "finished" if run.loop.failure is None else "interrupted"
        running = "running" if run.loop.failure is None else ended
        stage = None if active is None else active.stage
        return TrainerState(run.command, stage, running if active else ended)

    def _stage(self, name: str) -> tuple[list[Any], list[int | float]]:
        """Return the loaders of a stage, and for each its batches on this rank."""
        stage = self.run.stages[name] if self.run else None
        counts = stage.batches if stage else []
        infinity = float("inf")
        return stage.loaders if stage else [], [infinity if n is None else n for n in counts]

    def _plugins(self, has: str = "") -> list[Any]:
        """Return the callbacks and other plugins whose class has an attribute, in their order."""
        parts = (part.plugin for part in self.trainer.setup.parts if part.info.kind == "plugin")
        found = [getattr(plugin, "callback", plugin) for plugin in parts]
        return [plugin for plugin in found if not has or has in dir(plugin)]

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.trainer.is_global_zero:
            print(*values, **options)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the running or the last run.

        During a run every rank calls it. After the run rank 0 writes, and no rank waits.

        Args:
            filepath: the file.
            weights_only: leave out what only resuming a ``fit`` needs.

        Raises:
            UsageError: this trainer has not run anything, or the path is a folder.
            TrainingError: the file cannot be written.
        """
        save(self.run, filepath, weights_only)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the running or last run loaded, or ``None``."""
        start = self.run.loop.start if self.run else None
        return str(start.path) if start is not None and start.path is not None else None

    # --- plugins ----------------------------------------------------------------------------------

    callbacks = _of(lambda self: self._plugins(), "The callbacks and plugins, in their order.")
    checkpoint_callbacks = _of(
        lambda self: self._plugins("best_model_path"), "Each ``ModelCheckpoint``."
    )
    checkpoint_callback = _of(
        lambda self: _first(self.checkpoint_callbacks),
        "The first ``ModelCheckpoint``, or ``None``.",
    )
    early_stopping_callbacks = _of(
        lambda self: self._plugins("stopped_epoch"), "Each ``EarlyStopping``."
    )
    early_stopping_callback = _of(
        lambda self: _first(self.early_stopping_callbacks), "The first one, or ``None``."
    )
    progress_bar_callback = _of(
        lambda self: _first(self._plugins("shows_progress")), "The plugin that shows progress."
    )
    strategy = _of(
        lambda self: RunningStrategy(self, self._part("strategy")),
        "The strategy, with ``barrier()``, ``broadcast(obj)`` and the like.",
    )
    accelerator = _of(lambda self: self._part("accelerator"), "The accelerator, an object.")
    #: optuna-integration 5 reads ``trainer._accelerator_connector.is_distributed``.
    _accelerator_connector = strategy

    def _part(self, kind: str) -> Any:
        return next(part.plugin for part in self.trainer.setup.parts if part.info.kind == kind)

    # --- the run ----------------------------------------------------------------------------------

    lightning_module = _of_run("module", None, "The module of the running or last run.")
    model = _of_run("model", None, "The module as the strategy wrapped it.")
    optimizers: Any = _of_run("optimizers", (), "The optimizers of the running or last run.")
    lr_scheduler_configs = _of_run("schedulers", (), "The schedulers with their options.")
    training = _during("train")
    validating = _during("validate")
    testing = _during("test")
    predicting = _during("predict")
    sanity_checking = _during("sanity_check")
    evaluating = _of(
        lambda self: self.validating or self.testing or self.sanity_checking,
        "True in a validation, a test or the sanity check.",
    )
    interrupted = _of(
        lambda self: self.state.status == "interrupted", "True after an error, Ctrl-C or a signal."
    )
    received_sigterm = _of(
        lambda self: self.run is not None and self.run.loop.failure == "SIGTERM",
        "True if SIGTERM ended it.",
    )
    progress_bar_metrics = _of(
        lambda self: dict(self.run.logs.prog_bar) if self.run and hasattr(self.run, "logs") else {},
        "The newest value of every metric with ``prog_bar=True``.",
    )

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every metric that loggers got, a 0-d float64 tensor on the CPU."""
        metrics = self.run.logs.logged if self.run else {}
        return {n: torch.tensor(value, dtype=torch.float64) for n, value in metrics.items()}

    # --- data -------------------------------------------------------------------------------------

    train_dataloader = _loaders("train")
    val_dataloaders = _loaders("validate")
    test_dataloaders = _loaders("test")
    predict_dataloaders = _loaders("predict")
    num_val_batches = _batches("validate")
    num_test_batches = _batches("test")
    num_predict_batches = _batches("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Batches in one epoch; infinity if the loader has no length, and before ``fit``."""
        return next(iter(self._stage("train")[1]), float("inf"))

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole ``fit``, for schedulers; infinity if it has no end."""
        options, batches = self.trainer.run.plan.options, self.num_training_batches
        steps: int | float = float("inf")
        if options.max_epochs != -1 and batches != float("inf"):
            name, size = "get_accumulate_grad_batches", options.accumulate_grad_batches
            size_of = next((getattr(p, name) for p in self._plugins(name)), lambda epoch: size)
            steps = sum(-(-int(batches) // size_of(epoch)) for epoch in range(options.max_epochs))
        return steps if options.max_steps == -1 else min(steps, options.max_steps)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each loader in the sanity check."""
        limit = self.trainer.plan.options.num_sanity_val_steps
        batches: list[int | float] = self.num_val_batches
        return batches if limit == -1 else [min(limit, n) for n in batches]

    @property
    def is_last_batch(self) -> bool:
        """True in the last optimizer step of an epoch: with accumulation, in all its batches."""
        if self.run is None or not (batches := self._stage("train")[1]):
            return False
        size: int = self.trainer.plan.options.accumulate_grad_batches
        return self.run.batch_idx + size >= batches[0]

    # --- arguments and devices --------------------------------------------------------------------

    max_epochs = _option("max_epochs")
    max_steps = _option("max_steps")
    min_epochs = _option("min_epochs")
    min_steps = _option("min_steps")
    limit_train_batches = _option("limit_train_batches")
    limit_val_batches = _option("limit_val_batches")
    limit_test_batches = _option("limit_test_batches")
    limit_predict_batches = _option("limit_predict_batches")
    overfit_batches = _option("overfit_batches")
    val_check_interval = _option("val_check_interval")
    check_val_every_n_epoch = _option("check_val_every_n_epoch")
    num_sanity_val_steps = _option("num_sanity_val_steps")
    log_every_n_steps = _option("log_every_n_steps")
    accumulate_grad_batches = _option("accumulate_grad_batches")
    gradient_clip_val = _option("gradient_clip_val")
    gradient_clip_algorithm = _option("gradient_clip_algorithm")
    fast_dev_run = _option("fast_dev_run")
    precision = _of(lambda self: self.trainer.plan.precision.name, '``"32-true"``: the long form.')
    num_nodes = _of(lambda self: self.trainer.plan.num_nodes, "The number of machines.")
    device_ids = _of(lambda self: list(self.trainer.plan.devices), "The indices of its devices.")
    num_devices = _of(lambda self: len(self.trainer.plan.devices), "The devices of a node.")
    default_root_dir = _of(
        lambda self: str(self.trainer.output or os.getcwd()),
        "The run's folder, or the working directory.",
    )
    log_dir = default_root_dir

    @property
    def node_rank(self) -> int:
        """The number of this node, from 0."""
        place = self.run.world if self.run else self.trainer.cluster
        return place.node_rank if place else 0


def _first(found: Sequence[Any]) -> Any:
    return found[0] if found else None


def _one_or_list(loaders: list[Any]) -> Any:
    # Of a CombinedLoader Lightning returns the dict or list too.
    alone = loaders[0] if len(loaders) == 1 else loaders or None
    return alone.iterables if isinstance(alone, CombinedLoader) else alone
