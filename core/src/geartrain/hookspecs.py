"""The contract between the loop and its plugins: all hooks. Read this first.

A plugin is any object with methods marked ``@hookimpl``. There are two kinds of hook:

``@single``
    Exactly one **owner** answers: the strategy if it implements the hook, else the accelerator,
    else core. A plugin *wraps* the owner (``@hookimpl(wrapper=True)``), or replaces it
    (``replaces = {"hook"}`` on the class). If a wrapper returns ``None`` instead of the owner's
    result, the run ends with an error.
``@every``
    Every implementation is called, the last registered first: plugins in the reverse of the order
    given, then the strategy, the accelerator and core.

A hookimpl names only the arguments that it needs. ``run`` is the :class:`geartrain.Run`: plan,
module, model, optimizers, device, world, step, epoch, stage, metrics. *Default* is what core does
if neither the strategy nor the accelerator implements the hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from geartrain.loop.ranks import RankCoordinator
    from geartrain.loop.run import Run, World
    from geartrain.module.module import Module
    from geartrain.plan import Layout, Plan, PlanRequest
    from geartrain_callbacks import Media

hookspec = pluggy.HookspecMarker("geartrain")
hookimpl = pluggy.HookimplMarker("geartrain")

single = hookspec(firstresult=True)
every = hookspec

#: The version of the hooks. Entry points ``geartrain.contract`` name those of a distribution.
CONTRACT = 1

# --- before anything starts -----------------------------------------------------------------------


@single
def plan_processes(request: PlanRequest) -> Layout:
    """Plan the number of processes per node, and of devices per process.

    Fired: while planning, in the starting process. Start nothing here.
    Arguments: ``request`` has the accelerator's name, the device indices on each node, and the
        number of nodes.
    Returns: ``Layout(processes_per_node, devices_per_process, model_parallel_size)``; ``None``
        processes if a launcher decides.
    Default: one process per device.
    """


@every
def check_plan(plan: Plan, module: Module | type[Module]) -> None:
    """Refuse a plan that cannot work.

    Fired: after planning, before anything starts.
    Arguments: ``plan``, complete and frozen; ``module``, or its class under ``geartrain explain``.
    Raises: ``UsageError`` to refuse the plan.
    """


@single
def launch(run: Run, worker: Callable[[int], Any]) -> Any:
    """Start this node's processes and call ``worker(local_rank)`` in each of them.

    Fired: once a run, in the starting process.
    Arguments: ``worker`` sets up, runs the stage and tears down.
    Returns: the result of ``worker`` in rank 0.
    Default: ``worker(0)`` in this process. ``geartrain.parallel.launch`` is for several.
    """


# --- set-up, in this order ------------------------------------------------------------------------


@single
def setup_device(run: Run, local_rank: int) -> torch.device:
    """Prepare this process's device.

    Fired: first in each process.
    Arguments: ``local_rank`` counts this node's processes from 0.
    Returns: the device, which becomes ``run.device``.
    Default: the CPU.
    """


@single
def setup_process_group(run: Run) -> World:
    """Join the other processes.

    Fired: in each process, after ``setup_device``.
    Returns: ``World(rank, size, local_rank, local_size, node_rank)``. If ``size`` is not the plan's
        number of processes, the run ends with an error.
    Default: a world of one. After ``geartrain.parallel.launch``, ``run.cluster`` is this rank's
        place, and ``run.store`` is a new store, which torch's ``init_process_group()`` finds too.
    """


@single
def make_coordinator(run: Run) -> RankCoordinator:
    """Return the object with which several ranks agree on batches, metrics and predictions.

    Fired: once in each process, after ``setup_process_group``, if the world has several ranks.
    Returns: ``geartrain.parallel.SeveralRanks()``, which uses the collectives below.
    Default: the object for one rank.
    """


@single
def shard_dataloader(run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
    """Return this rank's part of a loader.

    Fired: once for each loader, also in a CombinedLoader, before the model is wrapped.
    Arguments: ``loader`` of the user; ``stage`` is ``"train"``, ``"validate"``, ``"test"`` or
        ``"predict"``.
    Returns: the loader to iterate in this process.
    Default: the loader itself, for one rank. ``geartrain.parallel.shard`` is for several; only
        for its shards ``trainer.predict`` restores the loader's order.
    """


@single
def wrap_model(run: Run, model: nn.Module) -> nn.Module:
    """Move the model to the device and wrap it for the strategy.

    Fired: once in each process, after ``setup_process_group`` and before ``configure_optimizers``.
    Arguments: ``model`` is ``StepForwarder(module)``: ``model("training_step", batch, batch_idx)``
        calls that method of the module.
    Returns: the module that the ``forward`` hook calls; it becomes ``run.model``. It may be
        ``model`` itself, wrapped in place as ``fully_shard`` does.
    Default: ``model.to(run.device)``, for one rank. With several ranks, each rank must get the
        weights of rank 0.
    """


@single
def wrap_optimizer(run: Run, optimizer: Optimizer) -> Optimizer:
    """Wrap one optimizer.

    Fired: once for each optimizer, after ``configure_optimizers``.
    Arguments: ``optimizer`` as ``configure_optimizers`` returned it.
    Returns: the optimizer to step.
    Default: the optimizer itself.
    """


@single
def load_checkpoint(run: Run, path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Fired: in each process, after the optimizers are wrapped, if the user passed a checkpoint; in a
        Session in each ``session.load``.
    Arguments: ``path`` of the file.
    Returns: the ``state`` that ``save_checkpoint`` got.
    Default: compares the file with its checksums, then calls
        ``torch.load(path, map_location="cpu", weights_only=True)``.
    """


# --- the training step, in this order -------------------------------------------------------------


@single
def device_batches(run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
    """Iterate over a loader and move each batch to the device.

    Fired: once for each loader and epoch.
    Arguments: ``loader`` and ``stage`` as in ``shard_dataloader``.
    Returns: an iterator of batches on ``run.device``. ``run.to_device(batch)`` moves a batch with
        the module's transfer hooks.
    Default: moves each batch when the loop asks for it.
    """


@single
def step(run: Run, micro_batches: Sequence[Any]) -> None:
    """Do one optimizer step: call the hooks from ``micro_step`` to ``optimizer_step``.

    Fired: once for each window of ``accumulate_grad_batches`` batches.
    Arguments: ``micro_batches``, the window's batches on the device.
    Default: ``geartrain.loop.fit.train_step``. In manual optimisation it calls ``training_step``
        once.
    """


@single
def micro_step(run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
    """Surround the forward and backward of one micro-batch.

    Fired: once a micro-batch.
    Arguments: ``first`` and ``last`` in its window; both are true without accumulation.
    Returns: a context manager, such as DDP's ``no_sync()``.
    Default: one that does nothing.
    """


@single
def forward(run: Run, method: str, args: tuple[Any, ...]) -> Any:
    """Call one step method of the module. Only this hook calls ``run.model``.

    Fired: once a micro-batch in training, once a batch in evaluation.
    Arguments: ``method`` is ``"training_step"``, ``"validation_step"``, ``"test_step"`` or
        ``"predict_step"``; ``args`` is ``(batch, batch_idx)``, and ``dataloader_idx`` with several
        loaders. In a Session ``method`` is ``"forward"`` or another method of the model, and
        ``args`` is ``((args, kwargs),)``.
    Returns: the method's result.
    Default: ``run.model(method, *args)`` in training. In evaluation and in manual optimisation it
        calls the bare module, because a wrapper may communicate and ranks may have unequal numbers
        of batches.
    """


@single
def backward(run: Run, loss: torch.Tensor) -> None:
    """Compute gradients.

    Fired: once a micro-batch; in manual optimisation, in each ``manual_backward``.
    Arguments: ``loss``, 0-d, already divided by the number of micro-batches in the window. A loss
        with a weight is divided by a weight instead; the last backward of the window follows after
        the gradients so far were divided by the total weight.
    Default: ``loss.backward()``.
    """


@single
def reduce_gradients(run: Run) -> None:
    """Replace every rank's gradients by the mean over ranks.

    Fired: once a step, after the last micro-batch's backward. In manual optimisation and in a
        Session, before each optimizer's step; ``run.optimizers`` has only that one. If the
        strategy has a method ``average_gradients``, manual optimisation has called it after each
        backward: do not average again.
    Default: nothing, for one process.
    """


@single
def clip_gradients(run: Run) -> torch.Tensor | None:
    """Clip the gradients to ``gradient_clip_val`` with ``gradient_clip_algorithm`` of the plan.

    Fired: once a step, after reduction and unscaling; in manual optimisation as
        ``reduce_gradients``.
    Returns: the total norm before clipping (0-d, on the device), or ``None`` if none was computed.
    Default: nothing; if ``gradient_clip_val`` is set, ``torch.nn.utils.clip_grad_norm_`` or
        ``clip_grad_value_``.
    """


@single
def optimizer_step(
    run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
) -> bool | None:
    """Step one optimizer.

    Fired: once a step for each optimizer; in manual optimisation, in each ``optimizer.step()``.
    Arguments: ``optimizer`` as ``wrap_optimizer`` returned it; ``closure`` computes loss and
        gradients again, for LBFGS; ``None`` for most optimizers.
    Returns: ``False`` if the step was skipped; schedulers then wait.
    Default: ``optimizer.step()`` or ``optimizer.step(closure)``.
    """


# --- collectives, on demand -----------------------------------------------------------------------


@single
def log_sync(run: Run, values: torch.Tensor) -> torch.Tensor:
    """Gather logged values from every rank in one collective.

    Fired: when metrics are flushed.
    Arguments: ``values``, float64 ``[n]`` on the CPU, with the same ``n`` on every rank.
    Returns: float64 ``[world_size, n]`` on the CPU.
    Default: ``values[None]``, for one rank.
    """


@single
def all_gather(run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    """Gather a tensor from every rank.

    Fired: by ``self.all_gather`` in the module; with ``sync_grads`` in its backward, too.
    Arguments: ``tensor``, of any shape; only the first dimension may differ between ranks.
    Returns: ``[world_size, *tensor.shape]``, or a list with one tensor per rank if the first
        dimensions differ.
    Default: ``tensor[None]``, for one rank.
    """


@single
def broadcast(run: Run, obj: Any, src: int) -> Any:
    """Give every rank the object of rank ``src``.

    Fired: on demand.
    Arguments: ``obj``, any object that pickles; ``src``, a global rank.
    Returns: rank ``src``'s object.
    Default: ``obj``, for one rank.
    """


@single
def barrier(run: Run) -> None:
    """Wait until every rank has called this hook.

    Fired: on demand.
    Default: nothing, for one rank.
    """


# --- checkpoints, monitors, loggers ---------------------------------------------------------------


@single
def model_state(run: Run) -> dict[str, Any]:
    """Return the module's state, as one process has it; an optimizer returns its own.

    Fired: in every rank for each checkpoint.
    Returns: whole tensors by name on rank 0; any other rank may return others.
    Default: ``run.module.state_dict()``.
    """


@single
def load_model_state(run: Run, state: dict[str, Any]) -> None:
    """Load the module's state.

    Fired: in every rank when a checkpoint is loaded.
    Arguments: ``state`` as ``model_state`` returned it on rank 0; a wrapper may change it.
    Default: ``run.module.load_state_dict(state)``.
    """


@single
def save_checkpoint(run: Run, state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint. The file must be complete or not exist.

    Fired: in every rank when a checkpoint is due.
    Arguments: ``state`` holds tensors and plain values, on rank 0 those of all ranks. If a plugin
        owns this hook, ``state["saved_by"]`` names the plugin, and a run without it refuses the
        checkpoint. ``path`` of the file.
    Default: rank 0 writes a temporary file with ``torch.save``, and renames it.
    """


@every
def find_checkpoint(which: str, output: Path | None) -> Sequence[Path]:
    """Return the checkpoints of this trainer's runs that the plugin knows.

    Fired: in the starting process, before anything starts, if ``ckpt_path`` is ``"best"``,
        ``"last"`` or ``"auto"``.
    Arguments: ``which`` is ``"best"``; ``"last"``, the newest checkpoint that a ``fit`` can resume;
        or ``"any"``, all of the run. ``output`` is the folder of the run.
    Returns: paths, whose files need not exist.
    """


@every
def device_stats(run: Run) -> dict[str, float] | None:
    """Report figures of the device.

    Fired: when a monitor asks, in the monitor's thread. Do not wait for the device, and do not call
        collectives.
    Returns: figures by name, with the unit in the name (``gpu0_memory_used_mib``), or ``None``.
    """


@every
def log_metrics(run: Run, metrics: Mapping[str, float], step: int) -> None:
    """Write metrics to a file, a server or the screen.

    Fired: on rank 0 after each flush of metrics; by plugins that have their own figures; in each
        ``session.log``.
    Arguments: ``metrics`` by name; ``step`` counts optimizer steps.
    """


@every
def log_media(run: Run, media: Media) -> None:
    """Write an image, a histogram, a text or a table.

    Fired: on rank 0, at once, by the module's ``log_image``, ``log_figure``, ``log_histogram``,
        ``log_text`` and ``log_table``.
    Arguments: ``media`` has ``kind``, ``name``, ``step`` and ``value``, see
        ``geartrain.callbacks.Media``; ``media.encoded()`` is the content of a file.
    """


# --- events ---------------------------------------------------------------------------------------


@every
def on_run_start(run: Run) -> None:
    """Act after set-up, before the first batch. The hooks are frozen.

    Fired: once a run, in each process; ``run.stage`` is the stage.
    """


@every
def on_fit_start(run: Run) -> None:
    """Act before anything of a ``fit``.

    Fired: once, after ``on_run_start``.
    """


@every
def on_sanity_check_start(run: Run) -> None:
    """Act before the sanity check.

    Fired: if the check runs: not after a resume, and not without validation loaders.
    """


@every
def on_sanity_check_end(run: Run) -> None:
    """Act after the sanity check.

    Fired: as ``on_sanity_check_start``.
    """


@every
def on_train_start(run: Run) -> None:
    """Act before the first epoch.

    Fired: once a ``fit``, after the sanity check; not if there is nothing left to train.
    """


@every
def on_epoch_start(run: Run) -> None:
    """Act before the first batch of a training epoch.

    Fired: once an epoch; again if a run resumes in the middle of an epoch.
    """


@every
def on_before_zero_grad(run: Run, optimizer: Optimizer) -> None:
    """Act before the gradients of an optimizer are cleared.

    Fired: once a step for each optimizer.
    Arguments: ``optimizer``, as ``wrap_optimizer`` returned it.
    """


@every
def on_train_batch_start(run: Run, batch: Any, batch_idx: int) -> int | None:
    """Act before a training batch.

    Fired: for each batch, before ``micro_step``.
    Arguments: ``batch`` on the device; ``batch_idx`` in the epoch, from 0.
    Returns: -1 ends the epoch before this batch; an error with several ranks.
    """


@every
def on_before_backward(run: Run, loss: torch.Tensor) -> None:
    """Act before a backward.

    Fired: for each batch that has a loss.
    Arguments: ``loss``, which ``backward`` gets: divided by the batches of the step.
    """


@every
def on_after_backward(run: Run) -> None:
    """Act after a backward. Gradients may not be reduced over ranks yet.

    Fired: for each batch that has a loss.
    """


@every
def on_before_optimizer_step(run: Run, optimizer: Optimizer) -> None:
    """Act before an optimizer steps. Gradients are reduced and clipped.

    Fired: once a step for each optimizer.
    Arguments: ``optimizer``, as ``wrap_optimizer`` returned it.
    """


@every
def on_train_batch_end(run: Run, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Act after a training batch.

    Fired: for each batch; for the last of a step after the optimizers have stepped.
    Arguments: ``outputs`` of ``training_step``, with their graph: detach what you keep; ``batch``
        on the device; ``batch_idx`` in the epoch, from 0.
    """


@every
def on_step_end(run: Run) -> None:
    """Act after an optimizer step. This is the hot path.

    Fired: once a step; ``run.step`` counts steps, and batches in manual optimisation.
    """


@every
def on_validation_start(run: Run) -> None:
    """Act before the first batch of an evaluation.

    Fired: once an evaluation; ``run.stage`` is ``"validate"``, ``"test"``, ``"predict"`` or
        ``"sanity_check"``.
    """


@every
def on_validation_epoch_start(run: Run) -> None:
    """Act before the first batch of an evaluation.

    Fired: in validation, test and prediction, after ``on_validation_start``; ``run.stage`` tells
        which.
    """


@every
def on_validation_batch_start(run: Run, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    """Act before a batch of an evaluation.

    Fired: for each batch, also in test and prediction.
    Arguments: ``batch`` on the device; ``batch_idx`` in its loader; ``dataloader_idx``, the loader.
    """


@every
def on_validation_batch_end(
    run: Run, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
) -> None:
    """Act after a batch of an evaluation.

    Fired: for each batch, also in test and prediction.
    Arguments: ``outputs`` of the step method; ``batch``, ``batch_idx`` and ``dataloader_idx`` as
        for ``on_validation_batch_start``.
    """


@every
def on_validation_epoch_end(run: Run) -> None:
    """Act after the last batch of an evaluation. What is logged is reported with it.

    Fired: in validation, test and prediction, before the flush and ``on_validation_end``.
    """


@every
def on_validation_end(run: Run) -> None:
    """Act after an evaluation. Its metrics are in ``run.metrics``.

    Fired: after the last batch, with ``run.stage`` as in ``on_validation_start``.
    """


@every
def on_train_epoch_end(run: Run) -> None:
    """Act after an epoch and its validation. What is logged is reported with the epoch.

    Fired: once an epoch, before the flush and ``on_epoch_end``.
    """


@every
def on_epoch_end(run: Run) -> None:
    """Act after a training epoch. Its metrics are in ``run.metrics``.

    Fired: after the last batch and the validation.
    """


@every
def on_train_end(run: Run) -> None:
    """Act after the last epoch.

    Fired: as ``on_train_start``.
    """


@every
def on_fit_end(run: Run) -> None:
    """Act at the end of a ``fit``.

    Fired: once, before ``on_run_end``; not after an error.
    """


@every
def on_checkpoint_saved(run: Run, path: Path) -> None:
    """Act after a checkpoint is complete on disk.

    Fired: on every rank after ``save_checkpoint``.
    Arguments: ``path`` of the file.
    """


@every
def on_exception(run: Run, error: BaseException) -> None:
    """Act after the run failed or was interrupted.

    Fired: before teardown, if Python still runs.
    Arguments: ``error``, which is raised again after teardown.
    """


@every
def on_run_end(run: Run) -> None:
    """Act after the run succeeded.

    Fired: once a run, before teardown, in each process.
    """


# --- teardown, also after an error ----------------------------------------------------------------


@single
def teardown_process_group(run: Run) -> None:
    """Leave the other processes.

    Fired: before ``teardown_device``, also if ``setup_process_group`` failed halfway.
    Default: nothing, for one rank.
    """


@single
def teardown_device(run: Run) -> None:
    """Free the resources that ``setup_device`` took.

    Fired: last in each process.
    Default: nothing.
    """
