"""Tuner: ``lr_find`` and ``scale_batch_size``, with the names of PyTorch Lightning's."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from geartrain import DataModule, Module, Trainer, TrainingError, UsageError
from geartrain.plugin_api import DataSource, check_data, check_module, overridden
from geartrain_tuner.batch_size import (
    StepTimer,
    Trial,
    free,
    is_out_of_memory,
    search,
    set_attribute,
    setting_of,
)
from geartrain_tuner.copies import copies, same_randomness
from geartrain_tuner.finder import check, finder, left_out, tell
from geartrain_tuner.lr import LRFinder, LRSweep, schedule


class Tuner:
    """Finds a learning rate and a batch size for a trainer.

    Accelerator, devices, strategy, precision, accumulation, clipping, seed and limits of training batches are the trainer's. A finder
    ignores its epochs, steps, validation, logging and folder, and leaves out plugins that watch a run (loggers, checkpoints, early
    stopping, averaged weights, all callbacks), with a line on standard error that names them. It keeps those that only wrap or own
    hooks of the step: they are part of the computation.

    A finder trains a deep copy of the module, and a copy of the DataModule that shares its data. So the module, its optimizer and the
    trainer stay as they were, but for the one attribute that the finder sets; random generators are restored. Hooks of the copy are
    called as in any ``fit``. A module that cannot be copied is refused.

    Args:
        trainer: the trainer that will ``fit``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: The trials of the newest ``scale_batch_size``, in order.
        self.trials: list[Trial] = []
        #: Why it found nothing larger.
        self.reason = ""
        self._told = False

    def lr_find(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        *,
        datamodule: DataModule | None = None,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        checkpoint: str | Path | None = None,
    ) -> LRFinder:
        """Train a copy of the module for ``num_training`` steps, with a learning rate that grows from ``min_lr`` to ``max_lr``.

        The first parameter group gets the learning rate and the others keep their ratio to it. Schedulers are not stepped. In manual
        optimisation the loss is the argument of a batch's first ``manual_backward``.

        Args:
            model: as for :meth:`geartrain.Trainer.fit`.
            train_dataloaders: the same.
            val_dataloaders: may be given, as in Lightning; a finder does not validate.
            datamodule: the same.
            min_lr: the first learning rate.
            max_lr: the last one.
            num_training: optimizer steps, at least 13.
            mode: whether the learning rate grows by equal factors, ``"exponential"``, or by equal steps, ``"linear"``.
            early_stop_threshold: end once the averaged loss is above so many times its best; ``None`` for never. It also ends if the
                loss is not finite.
            update_attr: set the module's attribute and hyperparameter to the suggestion.
            attr_name: its name; default ``lr`` or ``learning_rate``.
            checkpoint: weights to start from.

        Returns:
            The result, the same on every rank; ``suggestion()`` is ``None`` if there is none, with a warning if ``update_attr`` is set.

        Raises:
            UsageError: something that cannot work; nothing was started.
        """
        lrs = schedule(min_lr, max_lr, num_training, mode)
        if early_stop_threshold is not None and not early_stop_threshold > 1:
            raise UsageError(
                f"early_stop_threshold={early_stop_threshold!r} must be above 1; None for never."
            )
        train_dataloaders, datamodule = self._check(model, train_dataloaders, datamodule)
        name = learning_rate_of(model, attr_name) if update_attr else ""
        sweep = LRSweep(lrs, mode, early_stop_threshold)
        made = finder(self._trainer, sweep, num_training, log_every_n_steps=1)
        self._tell_left_out()
        loaders = (
            train_dataloaders
            if isinstance(train_dataloaders, list | tuple)
            else [train_dataloaders]
        )
        own, data = copies(model, datamodule)
        with same_randomness(*loaders):
            made.fit(own, train_dataloaders, datamodule=data, checkpoint=checkpoint)
        suggestion = sweep.found.suggestion()
        if update_attr and suggestion is not None:
            set_attribute(model, name, suggestion)
        elif update_attr:
            warnings.warn(
                f"{type(model).__name__}.{name} stays as it is, for there is no suggestion: {sweep.found.why_not()}",
                stacklevel=2,
            )
        return sweep.found

    def scale_batch_size(
        self,
        model: Any,
        train_dataloaders: DataModule | None = None,
        *,
        datamodule: DataModule | None = None,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        checkpoint: str | Path | None = None,
    ) -> int:
        """Find the largest batch that ``steps_per_trial`` steps run with, and set the attribute to it; :attr:`trials` has all sizes.

        Only running out of memory counts; any other error comes as it is. Validation is not tried.

        Args:
            model: a :class:`geartrain.Module`.
            train_dataloaders: a DataModule; a loader that is made already has its size.
            datamodule: has the loader, unless the module has it.
            mode: ``"power"`` doubles until a batch does not run; ``"binsearch"`` then continues between the last two.
            steps_per_trial: optimizer steps of each trial.
            init_val: the first size; if it does not run, it is halved.
            max_trials: sizes to try at most.
            batch_arg_name: the attribute or hyperparameter, of the DataModule or the module, that ``train_dataloader`` reads.
            checkpoint: weights to start from.

        Returns:
            The batch size, for each device.

        Raises:
            UsageError: something that cannot work, several processes among it; nothing was started, or the loader has another size.
            TrainingError: not even one sample runs.
        """
        if mode not in ("power", "binsearch"):
            raise UsageError(f"mode={mode!r}. Fix: 'power' or 'binsearch'")
        for name, value in (
            ("steps_per_trial", steps_per_trial),
            ("init_val", init_val),
            ("max_trials", max_trials),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} must be a whole number, at least 1.")
        self._check_one_process()
        loaders, datamodule = self._check(model, train_dataloaders, datamodule)
        if loaders is not None:
            raise UsageError(
                "a loader that is made already has its batch size. Fix: train_dataloader of the module or a DataModule, which reads "
                f"self.{batch_arg_name}"
            )
        owner = setting_of([owner for _, owner in owners_of(model, datamodule)], batch_arg_name)
        elsewhere = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
        if elsewhere:
            raise UsageError(
                f"{type(model).__name__} is on {min(elsewhere)}, and a finder trains a copy of it: both would take memory there. "
                "Fix: model.cpu()"
            )
        self._tell_left_out()
        self.trials, self.reason = [], ""
        trial = _Trials(self, model, datamodule, owner, batch_arg_name, steps_per_trial, checkpoint)
        found, self.reason = search(mode, init_val, max_trials, trial, lambda: trial.samples)
        if not found:
            raise TrainingError(
                f"no batch size runs: {self.trials[-1].batch_size} ran out of memory too ({self.trials[-1].error})"
            )
        set_attribute(owner, batch_arg_name, found)
        return found

    def _check(self, model: Any, loaders: Any, datamodule: Any) -> tuple[Any, DataModule | None]:
        """Refuse arguments that cannot be tuned. Return loaders and DataModule, separated."""
        if isinstance(loaders, DataModule) and datamodule is None:
            loaders, datamodule = None, loaders
        if isinstance(loaders, DataModule):
            raise UsageError("two DataModules are given. Fix: give one")
        if datamodule is not None:
            check_data(datamodule)
        if not isinstance(model, Module) and isinstance(model, torch.nn.Module):
            raise UsageError(
                f"{type(model).__name__} is a plain nn.Module. Fix: a geartrain.Module whose learning rate and batch size can be set"
            )
        check_module(model, "fit")
        check(self._trainer, loaders)
        return loaders, datamodule

    def _check_one_process(self) -> None:
        plan = self._trainer.plan
        if plan.processes != 1:
            raise UsageError(
                f"{plan.strategy.label} trains in {plan.processes or 'several'} processes, where running out of memory in one ends the "
                "run of all. Fix: find it on one device (--strategy single --devices 1): the batch size is that of one device"
            )

    def _tell_left_out(self) -> None:
        labels = left_out(self._trainer)
        if labels and not self._told:
            tell(
                self._trainer,
                f"tune: left out while finding, because they watch a run and this is none: {', '.join(labels)}",
            )
        self._told = True


class _Trials:
    """Tries one batch size after the other, each on another copy of the module."""

    def __init__(
        self,
        tuner: Tuner,
        model: Module,
        datamodule: DataModule | None,
        owner: Any,
        name: str,
        steps: int,
        checkpoint: Any,
    ) -> None:
        self._tuner, self._model, self._datamodule = tuner, model, datamodule
        self._owner, self._name, self._steps, self._checkpoint = owner, name, steps, checkpoint
        #: Samples in the data; ``None``: unknown.
        self.samples: int | None = None

    def __call__(self, size: int) -> bool:
        timer, failed, device = (
            StepTimer(size, f"{type(self._owner).__name__}.{self._name}"),
            None,
            None,
        )
        made = finder(self._tuner._trainer, timer, self._steps, limit_train_batches=None)
        with same_randomness():
            try:
                model, data = copies(self._model, self._datamodule)
                set_attribute(data if self._owner is self._datamodule else model, self._name, size)
                made.fit(model, datamodule=data, checkpoint=self._checkpoint)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = error
            finally:
                device = getattr(made._run, "device", None)
                model = data = made = None  # type: ignore[assignment]  # the run has the optimizers; free() collects all of them
        said = " ".join(str(failed).split()) or type(failed).__name__ if failed is not None else ""
        free(failed, device)
        self.samples = timer.samples
        speed = None if failed is not None else timer.samples_per_second
        self._tuner.trials.append(Trial(size, speed, said))
        if self._tuner._trainer.plan.options.enable_progress_bar:
            tell(
                self._tuner._trainer,
                f"batch size {size}: "
                + (f"{speed:.1f} samples/s" if speed is not None else "out of memory"),
            )
        return failed is None


def owners_of(model: Module, datamodule: DataModule | None) -> list[tuple[str, Any]]:
    """Return ``("data", datamodule)`` and ``("model", model)``, which may have the batch size; first the one that makes the loader."""
    both: list[tuple[str, Any]] = [("model", model)]
    if datamodule is not None:
        both.insert(
            0 if overridden(datamodule, DataSource.method("train")) else 1, ("data", datamodule)
        )
    return both


def learning_rate_of(model: Module, given: str) -> str:
    """Return the name of the module's attribute or hyperparameter to set.

    Raises:
        UsageError: it has none.
    """
    names = [given] if given else ["lr", "learning_rate"]
    for has in (
        partial(hasattr, model),
        model.hparams.__contains__,
    ):  # the present setting, before the argument
        for name in names:
            if has(name):
                return name
    raise UsageError(
        f"{type(model).__name__} has no {' or '.join(names)} to set. Fix: update_attr=False, or self.{names[0]} in __init__"
    )
