"""Tuner: ``lr_find`` and ``scale_batch_size``, with PyTorch Lightning's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from geartrain import DataModule, Module, Trainer, TrainingError, UsageError
from geartrain.plugin_api import DataSource, check_module, overridden, warn
from geartrain_tools.tuner.batch_size import (
    StepTimer,
    Trial,
    free,
    is_out_of_memory,
    search,
    set_attribute,
    setting_of,
)
from geartrain_tools.tuner.copies import copies, same_randomness
from geartrain_tools.tuner.finder import check, finder, left_out, print_line
from geartrain_tools.tuner.lr import LRFinder, LRSweep, schedule


class Tuner:
    """Find a learning rate and a batch size for a trainer.

    A finder uses the trainer's accelerator, devices, strategy, precision, accumulation, clipping,
    seed and limits of training batches. It ignores its epochs, steps, validation, logging and
    folder. It leaves out plugins that watch a run (loggers, checkpoints, early stopping, averaged
    weights, all callbacks) and names them on standard error. It keeps plugins that only wrap or own
    hooks of the step, because they are part of the computation.

    A finder trains a deep copy of the module, and a copy of the DataModule that shares its data.
    The module, its optimizer and the trainer do not change, except for the one attribute that the
    finder sets; random generators are restored. Hooks of the copy are called as in any ``fit``. A
    module that cannot be copied is refused.

    Args:
        trainer: the trainer that will ``fit``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: The trials of the last ``scale_batch_size``, in order.
        self.trials: list[Trial] = []
        #: Why the last ``scale_batch_size`` found nothing larger.
        self.reason = ""
        self._has_listed = False

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
        """Train a copy of the module with a learning rate that grows in each step.

        It grows from ``min_lr`` to ``max_lr`` in ``num_training`` steps. The first parameter group
        gets the learning rate; the other groups keep their ratio to it. Schedulers are not stepped.
        In manual optimisation the loss is the argument of a batch's first ``manual_backward``.

        Args:
            model: as for :meth:`geartrain.Trainer.fit`.
            train_dataloaders: as for ``fit``.
            val_dataloaders: accepted as in Lightning; a finder does not validate.
            datamodule: as for ``fit``.
            min_lr: the first learning rate.
            max_lr: the last learning rate.
            num_training: optimizer steps, at least 13.
            mode: the learning rate grows by equal factors (``"exponential"``) or by equal steps
                (``"linear"``).
            early_stop_threshold: end if the averaged loss is above this many times its best;
                ``None`` for never. The search also ends if the loss is not finite.
            update_attr: set the module's attribute and hyperparameter to the suggestion.
            attr_name: its name; default ``lr`` or ``learning_rate``.
            checkpoint: weights to start from.

        Returns:
            The result, the same on every rank. If no learning rate is suggested, ``suggestion()``
            returns ``None``, with a warning if ``update_attr`` is set.

        Raises:
            UsageError: an argument is wrong; nothing was started.
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
        self._print_left_out()
        loaders = (
            train_dataloaders
            if isinstance(train_dataloaders, list | tuple)
            else [train_dataloaders]
        )
        model_copy, data = copies(model, datamodule)
        with same_randomness(*loaders):
            made.fit(model_copy, train_dataloaders, datamodule=data, checkpoint=checkpoint)
        suggestion = sweep.found.suggestion()
        if update_attr and suggestion is not None:
            set_attribute(model, name, suggestion)
        elif update_attr:
            warn(
                f"{type(model).__name__}.{name} is unchanged, because no learning rate is "
                f"suggested: {sweep.found.why_not()}"
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
        """Find the largest batch with which ``steps_per_trial`` steps run; set the attribute to it.

        :attr:`trials` has all sizes that were tried. Only out-of-memory errors count; other errors
        are raised. Validation is not tried.

        Args:
            model: a :class:`geartrain.Module`.
            train_dataloaders: a DataModule; the batch size of an existing loader cannot change.
            datamodule: has the loader, unless the module has it.
            mode: ``"power"`` doubles until a batch does not run; ``"binsearch"`` then bisects
                between the last two.
            steps_per_trial: optimizer steps of each trial.
            init_val: the first size; if it does not run, it is halved.
            max_trials: the most sizes to try.
            batch_arg_name: the attribute or hyperparameter, of the DataModule or the module, that
                ``train_dataloader`` reads.
            checkpoint: weights to start from.

        Returns:
            The batch size per device.

        Raises:
            UsageError: an argument is wrong, or the strategy has several processes; nothing was
                started. Or the loader does not use the attribute.
            TrainingError: not even a batch of one sample runs.
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
                "a loader that is made already has its batch size. "
                "Fix: train_dataloader of the module or a DataModule, which reads "
                f"self.{batch_arg_name}"
            )
        owner = setting_of([owner for _, owner in owners_of(model, datamodule)], batch_arg_name)
        elsewhere = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
        if elsewhere:
            raise UsageError(
                f"{type(model).__name__} is on {min(elsewhere)}, and a finder trains a copy of it: "
                "both would take memory there. Fix: model.cpu()"
            )
        self._print_left_out()
        self.trials, self.reason = [], ""
        trial = _Trials(self, model, datamodule, owner, batch_arg_name, steps_per_trial, checkpoint)
        found, self.reason = search(mode, init_val, max_trials, trial, lambda: trial.samples)
        if not found:
            raise TrainingError(
                f"no batch size runs: {self.trials[-1].batch_size} ran out of memory too "
                f"({self.trials[-1].error})"
            )
        set_attribute(owner, batch_arg_name, found)
        return found

    def _check(self, model: Any, loaders: Any, datamodule: Any) -> tuple[Any, DataModule | None]:
        """Check arguments. Return loaders and DataModule, separated."""
        if isinstance(loaders, DataModule) and datamodule is None:
            loaders, datamodule = None, loaders
        if isinstance(loaders, DataModule):
            raise UsageError("two DataModules are given. Fix: give one")
        if not isinstance(model, Module) and isinstance(model, torch.nn.Module):
            raise UsageError(
                f"{type(model).__name__} is a plain nn.Module. "
                "Fix: pass a geartrain.Module whose learning rate and batch size can be set"
            )
        check_module(model, "fit", datamodule)
        check(self._trainer, loaders)
        return loaders, datamodule

    def _check_one_process(self) -> None:
        plan = self._trainer.plan
        if plan.processes != 1:
            raise UsageError(
                f"{plan.strategy.label} trains in {plan.processes or 'several'} processes. If one "
                "runs out of memory, the whole run ends. "
                "Fix: find it on one device (--strategy single --devices 1): "
                "the batch size is that of one device"
            )

    def _print_left_out(self) -> None:
        labels = left_out(self._trainer)
        if labels and not self._has_listed:
            print_line(
                self._trainer,
                f"tune: plugins that watch a run are left out: {', '.join(labels)}",
            )
        self._has_listed = True


class _Trials:
    """Try one batch size after another, each with a new copy of the module."""

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
                # The run has the optimizers; free() collects all of them.
                model = data = made = None  # type: ignore[assignment]
        text = " ".join(str(failed).split()) or type(failed).__name__ if failed is not None else ""
        free(failed, device)
        self.samples = timer.samples
        speed = None if failed is not None else timer.samples_per_second
        self._tuner.trials.append(Trial(size, speed, text))
        if self._tuner._trainer.plan.options.enable_progress_bar:
            print_line(
                self._tuner._trainer,
                f"batch size {size}: "
                + (f"{speed:.1f} samples/s" if speed is not None else "out of memory"),
            )
        return failed is None


def owners_of(model: Module, datamodule: DataModule | None) -> list[tuple[str, Any]]:
    """Return ``("data", datamodule)`` and ``("model", model)``; first the one with the loader."""
    both: list[tuple[str, Any]] = [("model", model)]
    if datamodule is not None:
        both.insert(
            0 if overridden(datamodule, DataSource.method("train")) else 1, ("data", datamodule)
        )
    return both


def learning_rate_of(model: Module, given: str) -> str:
    """Return the name of the module's attribute or hyperparameter to set.

    Raises:
        UsageError: the module has neither.
    """
    names = [given] if given else ["lr", "learning_rate"]
    # The attribute is the current setting, so it precedes the hyperparameter.
    for has in (partial(hasattr, model), model.hparams.__contains__):
        for name in names:
            if has(name):
                return name
    raise UsageError(
        f"{type(model).__name__} has no {' or '.join(names)} to set. "
        f"Fix: update_attr=False, or self.{names[0]} in __init__"
    )
