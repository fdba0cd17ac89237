"""The contract between the loop and its plugins: every hook there is. Read this first.

A plugin is any object with methods marked ``@hookimpl``. There are two kinds of hook:

``@single``
    Exactly one **owner** answers: the strategy if it implements the hook, else the accelerator, else core's precision or
    clipping, else ``builtin/defaults.py``. A plugin *wraps* it (``@hookimpl(wrapper=True)``), or says ``replaces = {"hook"}`` on its class.
    A wrapper that makes ``None`` of the owner's result ends the run.
``@every``
    Every implementation is called, last registered first: ``Trainer(plugins=[...])``, chosen plugins in the reverse of the
    order given, the strategy, the accelerator, core.

A hookimpl may leave out arguments that it does not need. ``run`` is the :class:`geartrain.Run`: plan, module, model,
optimizers, device, world, step, epoch, stage, metrics. *Default* says what happens when no plugin owns the hook.
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

    from geartrain.loop.ranks import OneRank
    from geartrain.loop.run import Run, World
    from geartrain.module.module import Module
    from geartrain.plan import Layout, Plan, PlanRequest

hookspec = pluggy.HookspecMarker("geartrain")
hookimpl = pluggy.HookimplMarker("geartrain")

single = hookspec(firstresult=True)
every = hookspec

# --- before anything starts ----------------------------------------------------------------------------------------------


@single
def plan_processes(request: PlanRequest) -> Layout:
    """Say how many processes a node the run needs, and how many devices each of them drives.

    Fired: while planning, in the starting process; starts nothing.
    Arguments: ``request`` has the accelerator's name, the device indices on each node and the number of nodes.
    Returns: ``Layout(processes_per_node, devices_per_process)``; ``Layout(None, 1)`` where a launcher decides.
    Default: one process a device.
    """


@every
def check_plan(plan: Plan, module: Module | type[Module]) -> None:
    """Refuse a combination that cannot work, by raising ``UsageError``.

    Fired: after planning, before anything starts.
    Arguments: ``plan``, frozen and whole; ``module``, the user's, or its class where none is made (``geartrain explain``).
    """


@single
def launch(run: Run, worker: Callable[[int], Any]) -> Any:
    """Start this node's processes and call ``worker(local_rank)`` in each of them.

    Fired: once a run, in the starting process.
    Arguments: ``worker`` sets up, runs the stage and tears down.
    Returns: what ``worker`` returned in rank 0.
    Default: ``worker(0)`` in this process, for a plan of one. ``geartrain.parallel.launch`` joins a launcher or starts the other
        processes by running the same command again.
    """


# --- set-up, in this order in each process -------------------------------------------------------------------------------


@single
def setup_device(run: Run, local_rank: int) -> torch.device:
    """Make this process's device ready and say which it is.

    Fired: first in each process.
    Arguments: ``local_rank`` counts from 0 on this node.
    Returns: the device; it becomes ``run.device``.
    Default: the CPU.
    """


@single
def setup_process_group(run: Run) -> World:
    """Join the other processes.

    Fired: in each process, after ``setup_device``.
    Returns: ``World(rank, size, local_rank, local_size, node_rank)``; ``size`` must be the plan's number of processes, or the
        run ends: a strategy that silently trains alone is an error.
    Default: a world of one. After ``geartrain.parallel.launch`` ``run.cluster`` says which rank this is, ``run.store`` is a fresh
        store, and ``MASTER_ADDR`` and ``MASTER_PORT`` name it, so ``torch.distributed.init_process_group("gloo")`` meets there.
    """


@single
def make_ranks(run: Run) -> OneRank:
    """Return how the ranks do together the work of one process: check their set-up, count batches, reduce metrics, collect predictions.

    Fired: once in each process, after ``setup_process_group``, if the world has several ranks.
    Returns: ``geartrain.parallel.SeveralRanks()``, which needs only the collectives below, or an object of a subclass.
    Default: that of a rank that is alone.
    """


@single
def shard_dataloader(run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
    """Give this rank its part of the data.

    Fired: once for each loader, before the model is wrapped.
    Arguments: ``loader`` as the user made it; ``stage`` is ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
    Returns: the loader to iterate in this process.
    Default: the loader itself, for one rank. ``geartrain.parallel.shard`` is for several. It gives ranks whole batches in turn to
        predict, which ``trainer.predict`` puts back in order; the outputs of another kind of shard are returned rank by rank.
    """


@single
def wrap_model(run: Run, model: nn.Module) -> nn.Module:
    """Move the model to the device and wrap it for the strategy.

    Fired: once in each process, after ``setup_process_group`` and before ``configure_optimizers``.
    Arguments: ``model`` is ``StepForwarder(module)``; ``model("training_step", batch, batch_idx)`` calls that method of the module.
    Returns: the module that the ``forward`` hook calls; it becomes ``run.model``.
    Default: ``model.to(run.device)``, for one rank. With several, every rank must begin with rank 0's weights.
    """


@single
def wrap_optimizer(run: Run, optimizer: Optimizer) -> Optimizer:
    """Wrap one optimizer.

    Fired: once for each optimizer, after ``wrap_model`` and ``configure_optimizers``.
    Arguments: ``optimizer`` as ``configure_optimizers`` returned it.
    Returns: the optimizer to step.
    Default: the optimizer itself.
    """


@single
def load_checkpoint(run: Run, path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Fired: when one was asked for, in each process, after the optimizers are made and wrapped; in a Session in each ``session.load``.
        In a ``fit`` that resumes, optimizers and schedulers then get their state, and last the parts that have ``load_state_dict``.
    Arguments: ``path`` of the file.
    Returns: what ``save_checkpoint`` was given.
    Default: compares the file with its digest, then ``torch.load(path, map_location="cpu", weights_only=True)``: a file can hold
        tensors, never code.
    """


# --- the training step, in the order fired -------------------------------------------------------------------------------


@single
def device_batches(run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
    """Iterate over a loader with each batch on the device; may prefetch.

    Fired: once an epoch and loader.
    Arguments: ``loader`` as ``shard_dataloader`` returned it; ``stage`` as there.
    Returns: an iterator of batches on ``run.device``. Call ``run.to_device(batch)``, which asks the module's
        ``transfer_batch_to_device`` if it is overridden.
    Default: each batch when it is asked for.
    """


@single
def step(run: Run, micro_batches: Sequence[Any]) -> None:
    """One whole optimizer step: the hooks from ``micro_step`` to ``optimizer_step``.

    Fired: once for each window of ``accumulate_grad_batches`` batches; the last window of an epoch may be shorter.
    Arguments: ``micro_batches`` on the device, as many as the window holds.
    Default: ``geartrain.loop.fit.train_step``. In manual optimisation geartrain-manual owns it: one call of ``training_step``.
    """


@single
def micro_step(run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
    """Surround one micro-batch's forward and backward: no_sync, locks, early communication.

    Fired: once a micro-batch.
    Arguments: ``first`` and ``last`` in its window; both are true without accumulation.
    Returns: a context manager.
    Default: one that does nothing.
    """


@single
def forward(run: Run, method: str, args: tuple[Any, ...]) -> Any:
    """Call one step method of the module. Nothing else calls ``run.model``.

    Fired: once a (micro-)batch in every stage.
    Arguments: ``method`` is ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``; ``args`` is
        ``(batch, batch_idx)``, and ``dataloader_idx`` with several loaders. In a Session ``method`` is ``"forward"`` or
        another of the model's, and ``args`` is ``((args, kwargs),)`` of its call.
    Returns: the method's result.
    Default: ``run.model(method, *args)`` in training; in evaluation the bare module, because a wrapper's forward may communicate
        and ranks may have unequal numbers of batches. In manual optimisation geartrain-manual owns it: always the bare module.
    """


@single
def backward(run: Run, loss: torch.Tensor) -> None:
    """Compute gradients.

    Fired: once a micro-batch; in manual optimisation, in each ``manual_backward``.
    Arguments: ``loss``, 0-d, already divided by the number of micro-batches in this window.
    Default: ``loss.backward()``.
    """


@single
def reduce_gradients(run: Run) -> None:
    """Make every rank's gradients the mean over ranks.

    Fired: once a step, after the last micro-batch's backward; a strategy that reduced during backward only finishes here. In manual
        optimisation before each optimizer's step, with that one alone in ``run.optimizers``. If the strategy has a method
        ``average_gradients``, geartrain-manual has then called it after each backward already: leave means as they are. A strategy that
        communicates from hooks on parameters would get in its way, and refuses manual optimisation in ``check_plan``.
    Default: nothing, which is right for one process.
    """


@single
def clip_gradients(run: Run) -> torch.Tensor | None:
    """Clip the gradients as the plan's ``gradient_clip_val`` and ``gradient_clip_algorithm`` say.

    Fired: once a step, after reduction and unscaling; in manual optimisation as ``reduce_gradients``.
    Returns: the total norm before clipping (0-d, on the device), or ``None`` where none was computed.
    Default: nothing; core's clipping owns it where ``gradient_clip_val`` is set: ``torch.nn.utils.clip_grad_norm_`` or
        ``clip_grad_value_``.
    """


@single
def optimizer_step(
    run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
) -> bool | None:
    """Step one optimizer.

    Fired: once a step for each optimizer; in manual optimisation, in each ``optimizer.step()``.
    Arguments: ``optimizer`` as ``wrap_optimizer`` returned it; ``closure`` computes loss and gradients again, for LBFGS and the
        like; ``None`` for the others.
    Returns: ``False`` if the step was skipped; schedulers then wait.
    Default: ``optimizer.step()`` or ``optimizer.step(closure)``.
    """


# --- collectives, on demand; their defaults are for one rank, geartrain.parallel.ProcessGroupStrategy has them for several -------


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
    """Gather a tensor from every rank; unequal first dimensions are padded on the way and cut again.

    Fired: by ``self.all_gather`` in the module.
    Arguments: ``tensor``, of any shape; only the first dimension may differ between ranks.
    Returns: ``[world_size, *tensor.shape]``, or a list with one tensor a rank where the first dimensions differ.
    Default: ``tensor[None]``, for one rank.
    """


@single
def broadcast(run: Run, obj: Any, src: int) -> Any:
    """Give every rank the object of rank ``src``.

    Fired: on demand.
    Arguments: ``obj``, anything that pickles; ``src``, a global rank.
    Returns: rank ``src``'s object.
    Default: ``obj``, for one rank.
    """


@single
def barrier(run: Run) -> None:
    """Wait until every rank is here.

    Fired: on demand.
    Default: nothing, for one rank.
    """


# --- checkpoints, monitors, loggers --------------------------------------------------------------------------------------


@single
def save_checkpoint(run: Run, state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all.

    Fired: in every rank when one is due.
    Arguments: ``state`` holds tensors and plain values, on rank 0 those of all ranks; if a plugin owns this hook, ``state["saved_by"]``
        names the plugin, and a run without it refuses the checkpoint. ``path`` of the file.
    Default: rank 0 writes a temporary file beside ``path`` with ``torch.save``, puts a digest of its bytes behind it and renames it.
    """


@every
def find_checkpoint(which: str, output: Path | None) -> Sequence[Path]:
    """Say which checkpoints of this trainer's runs you know.

    Fired: in the starting process, before anything starts, if ``ckpt_path`` is ``"best"``, ``"last"`` or ``"auto"``.
    Arguments: ``which`` is ``"best"``; ``"last"``, the newest checkpoint from which a ``fit`` can resume; or ``"any"``, all that you
        saved for the run. ``output`` is the folder of the run.
    Returns: files, which need not exist; an empty list if you know none.
    """


@every
def device_stats(run: Run) -> dict[str, float] | None:
    """Report figures of the device, units in their names (``gpu0_memory_used_mib``).

    Fired: when a monitor asks, in the monitor's thread: do nothing here that waits for the device or talks to other ranks.
    Returns: figures by name; ``None`` without any.
    """


@every
def log_metrics(run: Run, metrics: Mapping[str, float], step: int) -> None:
    """Write metrics where the user reads them.

    Fired: on rank 0 when metrics were flushed: every ``log_every_n_steps`` steps and at the end of an epoch; and by plugins that have
        figures of their own; in a Session in each ``session.log``.
    Arguments: ``metrics`` by name; ``step`` counts optimizer steps.
    """


# --- events --------------------------------------------------------------------------------------------------------------


@every
def on_run_start(run: Run) -> None:
    """The run is set up and its hooks are frozen; the first batch comes next.

    Fired: once a run, in each process; ``run.stage`` says which stage it is.
    """


@every
def on_epoch_start(run: Run) -> None:
    """A training epoch starts.

    Fired: before its first batch; once more in an epoch that a run which resumes takes up in its middle.
    """


@every
def on_step_end(run: Run) -> None:
    """An optimizer step is done; ``run.step`` counts it. In manual optimisation it counts batches.

    Fired: once a step. This is the hot path: without an implementation it is one call of a function that does nothing.
    """


@every
def on_validation_start(run: Run) -> None:
    """An evaluation starts.

    Fired: before its first batch; ``run.stage`` is ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"``.
    """


@every
def on_validation_end(run: Run) -> None:
    """An evaluation is done and its metrics are in ``run.metrics``.

    Fired: after its last batch, with ``run.stage`` as in ``on_validation_start``.
    """


@every
def on_epoch_end(run: Run) -> None:
    """A training epoch is done and its metrics are in ``run.metrics``.

    Fired: after its last batch and validation.
    """


@every
def on_checkpoint_saved(run: Run, path: Path) -> None:
    """A checkpoint is whole on disk.

    Fired: on every rank after ``save_checkpoint``.
    Arguments: ``path`` of the file.
    """


@every
def on_exception(run: Run, error: BaseException) -> None:
    """The run failed or was interrupted.

    Fired: before teardown, in each process where Python still can.
    Arguments: ``error``, which is raised again after teardown.
    """


@every
def on_run_end(run: Run) -> None:
    """The run is done and succeeded.

    Fired: once a run, before teardown, in each process.
    """


# --- always, in reverse order of set-up, also after an error -------------------------------------------------------------


@single
def teardown_process_group(run: Run) -> None:
    """Leave the other processes.

    Fired: last but one in each process, whatever happened before, also when ``setup_process_group`` raised halfway.
    Default: nothing, for one rank.
    """


@single
def teardown_device(run: Run) -> None:
    """Free what ``setup_device`` took.

    Fired: last in each process, whatever happened before.
    Default: nothing.
    """
