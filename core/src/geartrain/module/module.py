"""Module and DataModule, which users subclass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from geartrain.errors import TrainingError, UsageError, warn
from geartrain.errors.distributions import import_from
from geartrain.module.hparams import HyperparametersMixin
from geartrain.module.nested import move

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from geartrain.loop.run import Run
    from geartrain.trainer import Trainer


class NotAttached(RuntimeError, AttributeError):
    """``module.trainer`` of a module that no trainer runs or ran."""


class _OfClass(classmethod):  # type: ignore[type-arg]
    """``load_from_checkpoint``, which an instance does not have: it makes another one."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, owner)
        raise AttributeError("load_from_checkpoint makes a new module. Fix: call it on the class")


class Module(HyperparametersMixin, nn.Module):
    """A model with all that its training needs: ``training_step`` and ``configure_optimizers``.

    A subclass defines the steps that it needs:

    - ``training_step(batch, batch_idx)`` returns the loss (0-d tensor), a dict with it under
      ``"loss"``, or ``None`` to skip the batch. If the loss is a sum, put the number that it counts
      under ``"weight"``: the step then divides by the total over its batches and all ranks.
    - ``validation_step``, ``test_step``, ``predict_step(batch, batch_idx, dataloader_idx)``; you
      may leave out later arguments. ``predict_step`` by default returns ``self(batch)``.
    - ``training_step_end(outputs)``, ``validation_step_end``, ``test_step_end`` get a list with one
      output for each part of the batch (one part, except under dp) and return the step's output.
    - ``training_epoch_end(outputs)``, ``validation_epoch_end``, ``test_epoch_end`` get every step's
      output of the epoch on this rank (with several loaders a list for each).
    - ``train_dataloader()``, ``val_dataloader()``, ``test_dataloader()``,
      ``predict_dataloader()``, unless a DataModule or ``Trainer.fit`` brings the data.
    """

    _run: Run | None = None
    _trainer: Trainer | None = None
    #: Properties that ``torch.jit`` must not compile, and attributes that it must not read.
    __jit_unused_properties__ = (
        *("trainer", "device", "global_step", "current_epoch", "global_rank", "local_rank"),
        *("hparams", "logger", "loggers"),
    )
    __jit_ignored_attributes__ = ("_run", "_trainer", "_hparams", "_hparams_call")
    #: Set ``False`` on the class or in ``__init__`` if ``training_step`` does backward and steps
    #: itself: docs/manual-optimisation.md.
    automatic_optimization = True

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, *, strict: bool = True, **overrides: Any
    ) -> Self:
        """Make a module of this class with a checkpoint's hyperparameters and weights.

        Args:
            checkpoint_path: the file.
            strict: raise if a weight is missing, unexpected or of another shape; ``False``: load
                those that fit, and print which.
            overrides: arguments of ``__init__`` in place of the file's, or that it cannot hold; and
                ``map_location``, the module's device, otherwise the CPU.

        Raises:
            UsageError: no such file, an argument is missing or unknown, or weights do not fit.
            TrainingError: the file is damaged, or no checkpoint.
        """
        loading = import_from("geartrain_callbacks.from_checkpoint", "load_from_checkpoint")
        module: Self = loading.load(cls, checkpoint_path, strict, overrides)
        return module

    if not TYPE_CHECKING:
        load_from_checkpoint = _OfClass(load_from_checkpoint.__func__)

    # --- the module's run -------------------------------------------------------------------------

    def _attach(self, run: Run | None) -> None:
        """Attach this module, and each geartrain Module in it, to a run; detach with ``None``."""
        for module in self.modules():
            if isinstance(module, Module):
                module._run, module._trainer = run, run.trainer if run else module._trainer

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs or last ran this module.

        Raises:
            NotAttached: none did. It is a ``RuntimeError`` and, for ``hasattr``,
                ``AttributeError``.
        """
        if self._trainer is None:
            raise NotAttached(
                f"{type(self).__name__} is not attached to a Trainer. "
                "Fix: use self.trainer only inside fit, validate, test, predict"
            )
        return self._trainer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """As nn.Module's, but keep the errors of two names, and find submodules faster."""
            modules = self.__dict__.get("_modules")
            if modules is not None and name in modules:
                return modules[name]
            if name in ("trainer", "load_from_checkpoint"):
                return object.__getattribute__(self, name)
            return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        """The device of this process, or of the first parameter outside a run."""
        if self._run is not None:
            return self._run.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @device.setter
    def device(self, value: Any) -> None:
        raise UsageError("self.device is set by the run. Fix: take the assignment out")

    def _last_run(self) -> Run | None:
        return self._run or getattr(self._trainer, "_run", None)

    @property
    def global_step(self) -> int:
        """Optimizer steps done; in manual optimisation, batches. They stay after the run."""
        return run.step if (run := self._last_run()) else 0

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; after ``fit``, epochs done."""
        return run.epoch if (run := self._last_run()) else 0

    @property
    def global_rank(self) -> int:
        """The rank of this process among all, from 0."""
        return self._run.world.rank if self._run else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node, from 0."""
        return self._run.world.local_rank if self._run else 0

    @property
    def loggers(self) -> list[Any]:
        """The trainer's loggers; ``logger.experiment`` is the logger's own object."""
        return self._trainer.loggers if self._trainer else []

    @property
    def logger(self) -> Any:
        """The trainer's first logger, or ``None``."""
        return next(iter(self.loggers), None)

    # --- methods for a step -----------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Any = "mean",
        sync_dist: bool = False,
        rank_zero_only: bool = False,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Log one number. It stays on its device until the next flush: the CPU does not wait.

        Args:
            name: the metric's name; with both ``on_step`` and ``on_epoch`` it becomes
                ``name_step`` and ``name_epoch``.
            value: a number, a tensor of one element, or a torchmetrics ``Metric`` (with
                ``geartrain-callbacks``).
            prog_bar: show it beside the progress bar.
            logger: pass it to the loggers.
            on_step: log the newest value every ``log_every_n_steps``; default: in
                ``training_step`` only.
            on_epoch: log the reduced value at the end of the epoch; default: everywhere but in
                ``training_step``.
            reduce_fx: over the epoch and, with ``sync_dist``, over ranks: ``"mean"`` or ``"avg"``
                (weighted by batch size), ``"sum"``, ``"min"``, ``"max"``, or a function of a
                float64 tensor with all values, such as ``torch.median``.
            sync_dist: reduce over ranks; otherwise each rank keeps its own.
            rank_zero_only: called on rank 0 only.
            batch_size: the weight of a mean; default: the batch's ``batch_size`` or
                ``num_graphs``, else the first dimension of its first tensor.
            add_dataloader_idx: append ``/dataloader_idx_N`` if there are several loaders.

        Raises:
            TrainingError: not a single number, an unknown ``reduce_fx``, or other options than
                earlier for this name.
        """
        run = self._run
        if run is None:
            return warn("self.log does nothing: no Trainer runs this module")
        # By position, which costs half as much as by name.
        # fmt: off
        run.logs.log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
            rank_zero_only, batch_size, add_dataloader_idx,
        )
        # fmt: on

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values with the options of :meth:`log`.

        Args:
            dictionary: values by name; also a torchmetrics ``MetricCollection``.
        """
        run = self._run
        items = dictionary.items() if run is None else run.logs.items_of(dictionary)
        for name, value in items:
            self.log(name, value, **options)

    # Each of these gives rank 0's object at once to the loggers and to the folder ``media`` of the
    # run's folder; other ranks ignore their own. They do nothing in the sanity check. They raise
    # TrainingError for another object than the one described, and RuntimeError outside a run.

    def log_image(self, name: str, image: Any) -> None:
        """Log an image, or several in a grid.

        Args:
            image: a tensor ``[H, W]``, ``[C, H, W]`` or ``[N, C, H, W]``, a NumPy array (channels
                may be last) or a PIL image; floats from 0 to 1, integers from 0 to 255.
        """
        self._log_media("image", name, image)

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib ``Figure`` as an image, and close it."""
        self._log_media("figure", name, figure)

    def log_histogram(self, name: str, values: Any) -> None:
        """Log the distribution of a tensor of any shape, or of a list of numbers."""
        self._log_media("histogram", name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a text."""
        self._log_media("text", name, text)

    def log_table(self, name: str, data: Any, columns: Sequence[str] | None = None) -> None:
        """Log a table.

        Args:
            data: rows, with ``columns``; or columns by name: a dict of lists, a pandas DataFrame.
        """
        self._log_media("table", name, data, columns)

    def _log_media(self, kind: str, *arguments: Any) -> None:
        media = import_from("geartrain_callbacks.media", f"self.log_{kind}")
        media.log(self._run, kind, *arguments)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors and numbers from every rank. Every rank must call this.

        Args:
            data: a tensor or a number, or nested lists, tuples and dicts of them.
            sync_grads: the result has gradients: each rank's tensor gets the sum of its gradients
                on all ranks, which must all do the backward. A strategy that averages gradients
                then trains as one process does on the samples of all ranks.

        Returns:
            The same nesting, with each tensor as ``[ranks, *shape]``, of the ranks with different
            data, or as a list with one a rank if first dimensions differ.

        Raises:
            RuntimeError: outside a run.
            TrainingError: ranks bring different numbers of tensors.
        """
        run = self._run
        if run is None:
            raise RuntimeError("self.all_gather works only while a Trainer runs this module")
        return run.coordinator.gather(run, data, sync_grads)

    def optimizers(self) -> Optimizer | list[Optimizer]:
        """Return the optimizer, or the list of several.

        In manual optimisation their ``step()`` and ``zero_grad()`` call the hooks.

        Raises:
            TrainingError: in a Session, whose optimizers are the loop's.
        """
        self._refuse_in_own_loop("optimizers")
        found = run.optimizers if (run := self._last_run()) else []
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, the list of several, or ``None``."""
        found = [s.scheduler for s in run.schedulers] if (run := self._last_run()) else []
        return found[0] if len(found) == 1 else found or None

    # --- manual optimisation: automatic_optimization = False --------------------------------------

    def manual_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients with the hooks: scaled by the precision, averaged over ranks.

        Every rank must call it equally often. If a parameter gets a gradient on some ranks only, it
        gets the mean on all.

        Args:
            loss: 0-d, or of any shape with ``gradient=``.
            options: those of ``torch.Tensor.backward``: ``retain_graph``, ``create_graph``,
                ``gradient``, ``inputs``.

        Raises:
            TrainingError: optimisation is automatic, the loss has no backward, or the backward of a
                strategy takes no options.
        """
        self._manual("manual_backward", "manual_backward")(loss, options)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> torch.Tensor | None:
        """Clip the gradients of one optimizer, averaged over ranks and unscaled.

        Call it in ``configure_gradient_clipping``; in manual optimisation after the last
        ``manual_backward`` before the optimizer's ``step()``.

        Args:
            gradient_clip_val: the largest norm or value, above 0; ``None``: no clipping, only in
                ``configure_gradient_clipping``.
            gradient_clip_algorithm: ``"norm"``, the default, or ``"value"``.

        Returns:
            The total norm before clipping (0-d, on the device), or ``None`` for ``"value"``.

        Raises:
            TrainingError: in automatic optimisation outside ``configure_gradient_clipping``, or a
                wrong argument.
        """
        norm: torch.Tensor | None = self._manual("clip_gradients", "clip")(
            optimizer, gradient_clip_val, gradient_clip_algorithm or "norm"
        )
        return norm

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only this optimizer's parameters require gradients, until :meth:`untoggle_optimizer`.

        Raises:
            TrainingError: optimisation is automatic, or one is toggled already.
        """
        self._manual("toggle_optimizer", "toggle")(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Give every parameter the ``requires_grad`` that it had before :meth:`toggle_optimizer`.

        Raises:
            TrainingError: optimisation is automatic, or this optimizer is not toggled.
        """
        self._manual("untoggle_optimizer", "untoggle")(optimizer)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Toggle an optimizer in a ``with`` block, and untoggle it at its end."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def _manual(self, method: str, name: str) -> Any:
        """Return the function of geartrain-callbacks for a method of manual optimisation."""
        answer = getattr(self._run.loop.manual, name, None) if self._run is not None else None
        if answer is not None:  # from on_fit_start on
            return answer
        self._refuse_in_own_loop(method)
        refusals = import_from("geartrain_callbacks.manual.refusals", f"self.{method}")
        raise refusals.refusal(self, method)

    def _refuse_in_own_loop(self, method: str) -> None:
        if self._run is not None and self._run.mode == "session":
            raise TrainingError(
                f"{type(self).__name__} calls self.{method}, and in a Session backward and steps "
                "are your loop's. Fix: session.backward(loss) and optimizer.step() in the loop, or "
                "geartrain.Trainer"
            )

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*values, **options)

    # --- methods to override ----------------------------------------------------------------------

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``self(batch)``, the whole batch; override it if a batch holds more than inputs.

        Args:
            args: ``batch``, ``batch_idx`` and, with several loaders, ``dataloader_idx``.
        """
        batch = args[0] if args else kwargs["batch"]
        try:
            return self(batch)
        except Exception as error:
            if isinstance(batch, list | tuple):
                name, kind = type(self).__name__, type(batch).__name__
                error.add_note(
                    f"{name} has no predict_step, so its forward got the whole batch, a {kind} of "
                    f"{len(batch)}. Fix: def predict_step(self, batch, batch_idx): "
                    "return self(batch[0])"
                )
            raise

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list, two lists (optimizers, schedulers), a dict with
        ``"optimizer"`` and ``"lr_scheduler"``, a tuple of such dicts, or ``None``."""
        raise NotImplementedError

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of them, which this module adds to its trainer's.

        A callback replaces those of the trainer that have its class.
        """
        return []

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of one micro-batch.

        Args:
            loss: 0-d; divided by the number of micro-batches and, with 16-mixed, scaled.
            args: in manual optimisation, those of ``manual_backward``.
            kwargs: as ``args``.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of one optimizer, before the step, with :meth:`clip_gradients`.

        Without an override, the parameters of all optimizers are clipped together.

        Args:
            gradient_clip_val: the Trainer's.
            gradient_clip_algorithm: the Trainer's.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any = None
    ) -> None:
        """Step one optimizer with ``optimizer.step(closure=optimizer_closure)``, or skip the step.

        If no optimizer steps, schedulers wait. Every rank must do the same. In this method
        ``optimizer.step`` calls the hook ``optimizer_step``, thus a gradient scaler.

        Args:
            epoch: the running epoch, from 0.
            batch_idx: the index of the step's last batch; of the first if the optimizer needs a
                closure.
            optimizer_closure: returns the loss of that batch, detached. Gradients exist already,
                except for an optimizer that needs a closure, as LBFGS: there it computes them.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of one optimizer, before the batches of a step.

        Args:
            epoch: the running epoch, from 0.
            batch_idx: the index of the step's first batch.
        """
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step one learning-rate scheduler.

        Args:
            metric: the value that ReduceLROnPlateau monitors; ``None`` for other schedulers.
        """
        scheduler.step() if metric is None else scheduler.step(metric)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch to the device. Override it if ``.to(device)`` cannot."""
        return move(batch, device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is moved."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after it is moved."""
        return batch

    def prepare_data(self) -> None:
        """Download data: once a node, before anything else."""

    def setup(self, stage: str) -> None:
        """In each process before loaders are made; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """In each process at the end, also after an error."""

    def on_fit_start(self) -> None:
        """After set-up of ``fit``."""

    def on_fit_end(self) -> None:
        """At the end of ``fit``."""

    def on_train_start(self) -> None:
        """Before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before each epoch."""

    def on_train_epoch_end(self) -> None:
        """After each epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before each training batch; return -1 to end the epoch (only in a run of one rank)."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After each training batch; ``outputs`` is the detached result of ``training_step``."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are cleared."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Before each backward."""

    def on_after_backward(self) -> None:
        """After each backward; change gradients in ``on_before_optimizer_step`` instead."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before each optimizer's step; gradients are reduced and clipped."""

    def on_sanity_check_start(self) -> None:
        """Before the sanity check."""

    def on_sanity_check_end(self) -> None:
        """After the sanity check."""

    def on_validation_start(self) -> None:
        """Before the stage."""

    def on_validation_end(self) -> None:
        """After the stage, when its metrics are known."""

    def on_validation_epoch_start(self) -> None:
        """Before the stage's first batch."""

    def on_validation_epoch_end(self) -> None:
        """After the stage's last batch; values logged here are the epoch's metrics."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each batch."""

    # The same for the other evaluations.
    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add tensors and plain values to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the values that ``on_save_checkpoint`` added; change ``checkpoint["model"]``."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the model must not contain the trainer, its plugins and its data.
        return {key: value for key, value in vars(self).items() if key not in ("_run", "_trainer")}


class DataModule(HyperparametersMixin):
    """Data apart from the model.

    A subclass defines the loaders that it has. Each method returns a DataLoader or any iterable of
    batches; all but ``train_dataloader`` may also return a list or dict of DataLoaders.
    Checkpoints keep the state of one with ``state_dict()`` and ``load_state_dict(state)``.
    """

    trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Download data: once a node, before ``setup``."""

    def setup(self, stage: str) -> None:
        """In each process before loaders are made; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """In each process at the end, also after an error."""

    def train_dataloader(self) -> Iterable[Any]:
        """Return the batches to train on."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the batches to validate on."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the batches to test on."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the batches to predict."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "trainer"}


def plain_name(name: str) -> str:
    """Return a weight's name without the ``_orig_mod.`` that torch.compile of a part puts in."""
    return name.replace("_orig_mod.", "")


def match_names(weights: dict[str, Any], module: nn.Module) -> None:
    """Name weights as a module does, some of whose parts may be compiled."""
    names = {plain_name(name): name for name in module.state_dict()}
    for name in list(weights):
        weights[names.get(plain_name(name), name)] = weights.pop(name)


def overridden(thing: Module | DataModule | type[Module | DataModule], name: str) -> bool:
    """True if a subclass, which may be given itself, or the instance overrides ``name``."""
    cls = thing if isinstance(thing, type) else type(thing)
    base = Module if issubclass(cls, Module) else DataModule
    found = getattr(thing, name, None)
    return found is not None and getattr(found, "__func__", found) is not getattr(base, name, None)
