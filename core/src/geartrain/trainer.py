"""Trainer: fit, validate, test, predict. Each call goes from the plan to launch to the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from geartrain.checkpoint.checkpoints import (
    InitialCheckpoint,
    best_checkpoints,
    find_checkpoint_file,
    newest_last,
)
from geartrain.data.loaders import loader_batch_size
from geartrain.data.seeding import seed_everything
from geartrain.data.sources import DataSource, read_loaders
from geartrain.errors import GeartrainError, TrainingError, UsageError, warn
from geartrain.errors.distributions import import_from, import_optional
from geartrain.errors.hints import write_instead
from geartrain.hooks.manager import Hooks
from geartrain.hooks.spelling import warn_of_others
from geartrain.loop.run import Run
from geartrain.loop.step_forwarder import check_data, check_module
from geartrain.loop.worker import work
from geartrain.module.module import DataModule, Module, overridden
from geartrain.options import refuse_unknown
from geartrain.plan import Plan
from geartrain.planning.components import Setup
from geartrain.planning.trainer_base import TrainerBase


class Trainer(TrainerBase):
    """Trains a module.

    ``__init__`` checks and plans everything before anything starts; ``trainer.plan`` is the plan.

    Args:
        accelerator: ``"auto"``, ``"gpu"``, the name of an accelerator, or an object.
        devices: how many (``2``, ``-1`` for all, ``"auto"``), or which (``[0, 2]``, ``"0,2"``).
        strategy: ``"auto"``, the name of a strategy, or an object.
        num_nodes: number of machines.
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-true"``, ``"16-mixed"`` or
            ``"bf16-mixed"``; in short ``32``, ``64``, ``16`` (mixed), ``"bf16"`` (mixed).
        plugins: names of installed plugins, files (``"my_hooks.py"``), classes or objects.
        callbacks: objects of ``geartrain.callbacks.Callback`` and plugins, in call order.
        block: plugins to exclude: names or ``DISTRIBUTION[name]``.
        output: the run's folder; without it nothing is written; command line: runs/MODULE-N.
        max_epochs: epochs to train; -1: no end; default: 1000, or no end with ``max_steps``.
        min_epochs: epochs to train before ``should_stop`` (early stopping, ``max_time``) ends it.
        max_steps: optimizer steps to train; -1: no end.
        min_steps: the same in optimizer steps; training ends after both.
        max_time: time to train: ``"DD:HH:MM:SS"``, seconds, a ``timedelta`` or ``{"hours": 2}``.
        max_restarts: command line: how often a failed ``fit`` is started again; 0: never.
        limit_train_batches: batches an epoch: a number, or a fraction between 0.0 and 1.0.
        limit_val_batches: the same for each validation loader; 0 turns validation off.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each loader to predict, of all ranks together.
        overfit_batches: train and validate on the first batches of each loader, in order, the same
            in each epoch: a number, or a fraction between 0.0 and 1.0.
        reload_dataloaders_every_n_epochs: call ``train_dataloader()`` and ``val_dataloader()``
            again in each n-th epoch; 0: never.
        val_check_interval: validate after this fraction of an epoch, or number of batches; or if
            this time (as for ``max_time``, but no number) has passed since the last validation,
            at a flush or the end of an epoch.
        check_val_every_n_epoch: validate only every n-th epoch; ``None``:
            ``val_check_interval`` counts batches across epochs.
        num_sanity_val_steps: validation batches to try before training; -1: all.
        accumulate_grad_batches: batches whose gradients are averaged into one optimizer step.
        gradient_clip_val: the largest gradient norm or value; ``None``: no clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        log_every_n_steps: steps between flushes of logged metrics.
        enable_progress_bar: show progress and the closing table.
        use_distributed_sampler: let a strategy of several processes shard the loaders.
        fast_dev_run: try one batch (or this many) of everything, write nothing.
        seed: seeds Python, NumPy and torch.
        deterministic: use deterministic algorithms; ``"warn"``: warn if an operation has none.
        inference_mode: evaluate under ``torch.inference_mode()`` instead of ``torch.no_grad()``.
        detect_anomaly: stop in the backward pass that makes a NaN, and show its forward call; slow.
        sync_batchnorm: during ``fit`` let BatchNorm layers use the statistics of all ranks.
        accelerator_options: options of the accelerator, by name.
        strategy_options: options of the strategy, by name.
        plugin_options: options of named plugins: ``{"gradient_norm": {"every": 10}}``.
        assume: device counts to plan with (``{"cuda": 8}``); such a trainer can only explain.

    Raises:
        UsageError: arguments that cannot work.
    """

    #: The DataModule of the last run.
    datamodule: DataModule | None = None
    refusal: ClassVar[str] = ""  #: If it is not empty, every run is refused with it.
    # Properties of TrainerView, in geartrain-callbacks.
    logged_metrics: dict[str, torch.Tensor]
    num_training_batches: int | float
    estimated_stepping_batches: int | float

    def __init__(
        self,
        *,
        accelerator: str | Any = "auto",
        devices: int | str | Sequence[int] = "auto",
        strategy: str | Any = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
        plugins: Any = (),
        callbacks: Any = (),
        block: Sequence[str] = (),
        output: str | Path | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | float | timedelta | Mapping[str, float] | None = None,
        max_restarts: int = 0,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        reload_dataloaders_every_n_epochs: int = 0,
        # str first: the command line would read 10:00:00:00 as a number to the base 60.
        val_check_interval: str | int | float | timedelta | Mapping[str, float] = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        log_every_n_steps: int = 50,
        enable_progress_bar: bool = True,
        use_distributed_sampler: bool = True,
        fast_dev_run: bool | int = False,
        seed: int | None = None,
        deterministic: bool | str = False,
        inference_mode: bool = False,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        accelerator_options: Mapping[str, Any] | None = None,
        strategy_options: Mapping[str, Any] | None = None,
        plugin_options: Mapping[str, Mapping[str, Any]] | None = None,
        assume: Mapping[str, int] | None = None,
        **unknown: Any,
    ) -> None:
        arguments = dict(locals())
        refuse_unknown("Trainer", unknown, Trainer)
        super().__init__(arguments)
        if seed is not None:  # now, so that a module made after this trainer has the seed's weights
            seed_everything(seed)
        #: The argument of :meth:`predict`; a plugin may set it if it is ``None``.
        self.return_predictions: bool | None = None

    # --- the four commands ------------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Iterable[Any] | DataModule | None = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        checkpoint: str | Path | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        **unknown: Any,
    ) -> None:
        """Train ``model``. Afterwards it has the trained weights.

        Args:
            model: a :class:`geartrain.Module`; or an ``nn.Module`` with ``loss`` and ``optimizer``.
            train_dataloaders: a DataLoader, any iterable of batches, or a DataModule.
            val_dataloaders: the same, or a list or dict of DataLoaders, numbered in their order.
            datamodule: the source of loaders that are not given.
            ckpt_path: resume from this checkpoint as if ``fit`` had not stopped: a file, ``"best"``
                or ``"last"`` as for :meth:`validate`, or ``"auto"``: the last one if it exists,
                otherwise from scratch; if that ``fit`` is done, nothing is trained. Epochs and
                steps count from the start.
            checkpoint: weights to start from: a file, ``"best"`` or ``"last"``; optimizers and
                counters start from scratch.
            loss: of a plain ``nn.Module``: ``loss(output, target)``; ``None`` if its output has the
                loss as ``loss``.
            optimizer: of a plain ``nn.Module``: a class, a ``functools.partial``, or an optimizer
                of its parameters.

        Raises:
            UsageError: something that cannot work; nothing was started.
            TrainingError: the run failed in a way that geartrain can explain. Errors of user code
                are raised as they are, with a note if a plugin's hook raised them.
        """
        refuse_unknown("Trainer.fit", unknown, self.fit)
        if ckpt_path is not None and checkpoint is not None:
            raise UsageError(
                "ckpt_path= resumes everything, checkpoint= starts from the weights alone. "
                "Fix: give one of them"
            )
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        resumes = ckpt_path is not None
        start = ckpt_path if resumes else checkpoint
        self._start("fit", model, given, datamodule, start, loss, optimizer, resumes)

    def validate(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> list[dict[str, float]]:
        """Validate once.

        Args:
            model: default: the last run's; if no loaders are given, its DataModule too.
            dataloaders: as ``val_dataloaders`` of :meth:`fit`.
            datamodule: the source of loaders that are not given.
            ckpt_path: weights to read first: a file, ``"best"`` (the ``best_model_path`` of the
                trainer's ModelCheckpoint) or ``"last"`` (the newest that ``save_last`` or the run's
                folder has). Without ``model`` the default is the best, if it exists.
            loss: of a plain ``nn.Module``, as for :meth:`fit`.

        Returns:
            One dict a loader, of its metrics by name; names without a loader's suffix are in each.

        Raises:
            UsageError: something that cannot work; nothing was started.
            TrainingError: the run failed in a way that geartrain can explain.
        """
        given = {"validate": dataloaders}
        metrics = self._start("validate", model, given, datamodule, ckpt_path, loss)
        return self._per_loader("validate", metrics)

    def test(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> list[dict[str, float]]:
        """Test once; arguments, result and errors as for :meth:`validate`."""
        given = {"test": dataloaders}
        metrics = self._start("test", model, given, datamodule, ckpt_path, loss)
        return self._per_loader("test", metrics)

    def predict(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        return_predictions: bool | None = None,
    ) -> list[Any] | None:
        """Collect the results of ``predict_step``; arguments as for :meth:`validate`.

        Args:
            return_predictions: ``False`` keeps no output; default: ``True``, unless a callback
                writes them (:class:`geartrain.callbacks.BasePredictionWriter`).

        Returns:
            One output a batch, on the CPU; a list of such lists if there are several loaders;
            ``None`` if no output is kept. Every rank returns the outputs of all ranks, in the
            loader's order, and needs the memory for them. If ranks do not share a loader (an
            IterableDataset, a DistributedSampler of the user), the outputs of rank 0 come first,
            then those of rank 1, and so on.

        Raises:
            TrainingError: the run failed; or an output cannot be pickled to reach the other ranks.
        """
        self.return_predictions = return_predictions
        given = {"predict": dataloaders}
        outputs: list[Any] | None = self._start("predict", model, given, datamodule, ckpt_path)
        return outputs

    def checkpoint_file(self, given: str | Path | None, resumes: bool = False) -> Path | None:
        """Return the file that ``ckpt_path=`` means; raises as :func:`find_checkpoint_file`."""
        return find_checkpoint_file(given, self.hooks, self.output, resumes)

    def resume_file(self) -> Path | None:
        """Return the checkpoint from which a ``fit`` that was interrupted resumes, if any."""
        if self._run is None or self._run.command != "fit":
            return None
        with suppress(GeartrainError):  # all are damaged
            return newest_last(self.hooks, self.output)
        return None

    def check(
        self,
        model: Module | type[Module],
        command: str = "fit",
        batch_size: int | None = None,
        datamodule: DataModule | None = None,
        resumes: bool = False,
    ) -> Plan:
        """Complete and check the plan for a module or its class. Start nothing.

        Args:
            model: the module, or its class.
            command: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            batch_size: samples in one batch of the training loader, if known.
            datamodule: its arguments belong to the plan's hyperparameters.
            resumes: True if ``fit`` resumes a run that stopped.

        Returns:
            The complete plan, which is also ``trainer.plan``.

        Raises:
            UsageError: a module or a plan that cannot work.
        """
        check_module(model, command)
        if isinstance(model, Module) and overridden(model, "configure_callbacks"):
            wanted = f"{type(model).__name__}.configure_callbacks"
            merging = import_from("geartrain_callbacks.callback", wanted)
            self._setup = merging.with_callbacks_of(self._setup, model)
        if self.is_global_zero:
            name = (model if isinstance(model, type) else type(model)).__name__
            hint = "use a hook of geartrain, or rename it"
            warn_of_others(model, name, hint, Module, modules=False)
            if datamodule is not None:
                name, hint = type(datamodule).__name__, "the same method of the module"
                warn_of_others(datamodule, name, hint, DataModule)
        known = Plan.hyperparameters_of(None if isinstance(model, type) else model, datamodule)
        self.plan = replace(
            self.plan, loader_batch_size=batch_size, hyperparameters=known, resumes=resumes
        )
        if command == "fit" and not model.automatic_optimization:
            # First without the parts of manual optimisation: the refusal of a strategy is clearer
            # than an error about two owners of a hook.
            Hooks(self._setup.parts).check_plan(plan=self.plan, module=model)
        self.hooks = self._setup.hooks(model, command)
        self._setup.check(self.hooks, model)
        return self.plan

    def _start(
        self,
        command: str,
        model: Any,
        given: dict[str, Any],
        datamodule: DataModule | None,
        checkpoint: Any,
        loss: Any = None,
        optimizer: Any = None,
        resumes: bool = False,
    ) -> Any:
        if Trainer.refusal:
            raise UsageError(Trainer.refusal)
        if model is None and command != "fit":
            model, datamodule, checkpoint = self._as_before(command, given, datamodule, checkpoint)
        model = _as_module(command, model, loss, optimizer)
        for stage, loaders in list(given.items()):
            if isinstance(loaders, DataModule):
                if datamodule is not None:
                    raise UsageError("two DataModules are given. Fix: give one")
                given[stage], datamodule = None, loaders
            elif loaders is not None:
                read_loaders(loaders, stage)  # refused before anything starts
        if datamodule is not None:
            check_data(datamodule)
        source = DataSource(given, datamodule)
        try:
            with self._setup.reserved_folder(resumes):
                return self._launch(command, model, source, checkpoint, resumes)
        except Exception as error:
            self.hooks.explain(error, notes=False)
            raise  # GEARTRAIN_TRACEBACK=1 shows all lines of geartrain

    def _launch(
        self, command: str, model: Module, source: DataSource, checkpoint: Any, resumes: bool
    ) -> Any:
        given, datamodule = source.given, source.datamodule
        size = loader_batch_size(given.get("train"))
        size = getattr(datamodule, "batch_size", None) if size is None else size
        self.check(model, command, size, datamodule, resumes)
        source.check("train" if command == "fit" else command, model)
        file = self.checkpoint_file(checkpoint, resumes)
        start = InitialCheckpoint(file, resumes, may_be_done=checkpoint == "auto")
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self
        hooks, mode = self.hooks, "automatic" if model.automatic_optimization else "manual"
        # An evaluation reports the step of the fit before it.
        steps, epochs = (0, 0) if command == "fit" else (self.global_step, self.current_epoch)
        run = self._run = Run(self.plan, hooks, model, self, command, mode)
        run.cluster, run.output, run.step, run.epoch = self.cluster, self.output, steps, epochs
        run.loop.source, run.loop.start = source, start
        try:
            result = hooks.launch(run=run, worker=partial(work, run, source, start))
        except BaseException as error:  # a rank that is another process noted it in its own run
            run.note_failure(error)
            if isinstance(error, KeyboardInterrupt) and (path := self.resume_file()):
                error.add_note(f"Resume: trainer.fit(..., ckpt_path={str(path)!r})")
            raise
        owner = hooks.owner("launch")
        label = owner.label if owner else "geartrain"
        # The worker sets logs; so does the result of a rank 0 that is another process.
        if not hasattr(run, "logs") or (result is None and command in ("validate", "test")):
            message = f"launch of {label} returned without the result of {command}"
            hint = "return worker(local_rank) of rank 0, or apply its result"
            raise TrainingError(f"{message}. Fix: {hint} (docs/write-a-strategy.md)")
        return result

    def _as_before(
        self, command: str, given: Mapping[str, Any], datamodule: DataModule | None, checkpoint: Any
    ) -> tuple[Any, Any, Any]:
        """Return the last run's model, the data and the weights; by default its data and the best.

        Source: Lightning does the same.
        """
        if self._run is None:
            raise UsageError(
                f"there is no model to {command}. "
                f"Fix: {command}(model, ...), or fit one with this trainer first"
            )
        if datamodule is None and given[command] is None:
            datamodule = self.datamodule
        if checkpoint is None and best_checkpoints(self.hooks, self.output):
            checkpoint = "best"
            if self.is_global_zero:
                message = f"{command} without a model reads the best weights"
                warn(f"{message}. Say ckpt_path='best', or give the model")
        return self._run.module, datamodule, checkpoint

    def _per_loader(self, stage: str, metrics: dict[str, float]) -> list[dict[str, float]]:
        count = len(self.run.stages[stage].batches)
        if count == 1:
            return [metrics]
        suffix = "/dataloader_idx_"
        return [
            {k: v for k, v in metrics.items() if suffix not in k or k.endswith(f"{suffix}{i}")}
            for i in range(count)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state from which another process makes this trainer."""
        return {key: value for key, value in vars(self).items() if key not in ("hooks", "_run")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, hooks=Hooks(state["_setup"].parts), _run=None)
        if self.datamodule is not None:
            self.datamodule.trainer = self

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of Lightning's that geartrain-callbacks has; raise for others."""
            try:  # once more, for the error, which may be a property's own
                return object.__getattribute__(self, name)
            except AttributeError as error:
                views = import_optional("geartrain_callbacks.trainer_view")
                view = None if views is None or name[:2] == "__" else views.TrainerView
                if view is not None and hasattr(view, name):
                    return getattr(view(self, self._run), name)
                more = "" if view else ". More of Lightning's: pip install geartrain-callbacks"
                message = f"{error}{write_instead('Trainer', name) or more}"
                raise AttributeError(message, name=name, obj=self) from None

    # --- properties -------------------------------------------------------------------------------

    @property
    def setup(self) -> Setup:
        """The parts, the plan, the launcher and the installed plugins, for another process."""
        return self._setup

    @property
    def output(self) -> Path | None:
        """The run's folder, or ``None``."""
        return self.plan.output

    @property
    def run(self) -> Run:
        """The running or last run.

        Raises:
            RuntimeError: this trainer has not run anything.
        """
        if self._run is None:
            raise RuntimeError("this trainer has not run anything yet")
        return self._run

    @property
    def global_step(self) -> int:
        """Optimizer steps done; in manual optimisation, batches."""
        return self._run.step if self._run else 0

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; after ``fit``, epochs done."""
        return self._run.epoch if self._run else 0

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every logged metric, a 0-d tensor on the CPU."""
        metrics = self._run.metrics if self._run else {}
        # float64, so that ``.item()`` is the number that was logged.
        return {n: torch.tensor(value, dtype=torch.float64) for n, value in metrics.items()}

    @property
    def should_stop(self) -> bool:
        """Set it to end training after this step; with several ranks at the next flush."""
        return bool(self._run and self._run.should_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.should_stop = value
        if self.world_size == 1:
            self.run.logs.stop = value  # at the next step: no other rank has to agree


def _as_module(command: str, model: Any, loss: Any, optimizer: Any) -> Any:
    """Return a Module as it is; geartrain-callbacks makes one of another ``nn.Module``."""
    if isinstance(model, type):
        raise UsageError(f"{model.__name__} is a class. Fix: {command}({model.__name__}(...), ...)")
    is_plain = isinstance(model, nn.Module) and not isinstance(model, Module)
    if is_plain or loss is not None or optimizer is not None:
        wanted = f"{command} of {type(model).__name__}, which is no geartrain.Module,"
        wrapping = import_from("geartrain_callbacks.wrapped_module", wanted)
        return wrapping.as_module(command, model, loss, optimizer)
    if isinstance(model, Module):
        vars(model).pop("_compile_with", None)
    return model
