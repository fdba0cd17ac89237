"""The work of each process: set up, run, tear down. hookspecs.py documents the order."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from geartrain.checkpoint.checkpoints import InitialCheckpoint, load
from geartrain.data.seeding import seed_everything
from geartrain.data.sources import DataSource
from geartrain.errors import TrainingError, UsageError, warn
from geartrain.hooks.events import methods_of
from geartrain.hooks.plugin_info import PluginInfo
from geartrain.loop.evaluate import evaluate
from geartrain.loop.fit import fit
from geartrain.loop.optimizers import parameters_of
from geartrain.loop.run import Run
from geartrain.loop.stages import set_up_loaders
from geartrain.loop.step_forwarder import StepForwarder


def work(run: Run, source: DataSource, start: InitialCheckpoint, local_rank: int) -> Any:
    """Set up this process, run the command and tear down, also after an error.

    Args:
        source: the source of loaders.
        start: the checkpoint to start from.
        local_rank: this process on its node, from 0.

    Returns:
        For ``validate`` and ``test`` the metrics, for ``predict`` the outputs, otherwise ``None``.
    """
    options = run.plan.options
    owners = [owner for owner in (run.module, source.datamodule) if owner is not None]
    tears_down = run.torn_down(owners)
    with tears_down as undo, _exit_fails(run):
        undo.append(run.hooks.teardown_device)
        run.device = run.hooks.setup_device(run=run, local_rank=local_rank)
        undo.append(run.hooks.teardown_process_group)
        run.join_processes()
        if options.seed is not None:
            seed_everything(options.seed)
        _attach(run, source)
        file = start.path if run.loop.memory_checkpoint is None else None
        # Only the name: nodes may keep their copies in different folders.
        run.coordinator.check(run, None if file is None else file.name)
        run.loop.source, run.loop.start = source, start
        set_up_loaders(run)
        _set_up_model(run, start)
        if options.seed is not None and run.world.data_rank:  # the same weights, but other dropout
            seed_everything(options.seed + run.world.data_rank)
        module = PluginInfo(type(run.module).__name__, "core", None, None, "the user's module")
        run.hooks.add_methods(methods_of(run), module)
        run.hooks.freeze()
        run.hooks.on_run_start(run=run)
        result = None
        if run.command == "fit":
            fit(run)
        else:
            result = evaluate(run, run.command)
        run.hooks.on_run_end(run=run)
        if run.world.size > 1:  # if a rank failed after the last collective, all fail here
            run.hooks.barrier(run=run)
    return result


def _attach(run: Run, source: DataSource) -> None:
    run.reset_logs()
    run.loop.unwrapped = StepForwarder(run.module)
    run.module._attach(run)
    owners = [owner for owner in (source.datamodule, run.module) if owner is not None]
    for owner in owners:
        if run.world.local_rank == 0:
            owner.prepare_data()
    run.hooks.barrier(run=run)
    for set_up in run.loop.before_setup:
        set_up()
    for owner in owners:
        owner.setup(run.command)
    run.module._attach(run)  # setup may have made submodules


def _set_up_model(run: Run, start: InitialCheckpoint) -> None:
    in_eval_mode = sum(not part.training for part in run.module.modules())
    if run.command == "fit" and in_eval_mode:
        message = f"{in_eval_mode} submodules are in eval mode and stay so in training"
        warn(f"{message}. Fix if unmeant: model.train() before fit")
    run.model = run.hooks.wrap_model(run=run, model=run.loop.unwrapped)
    wrappers = run.hooks.implementers("wrap_model")
    run.loop.unwrapped.wrapped = any(not plugin.is_core for plugin in wrappers)
    run.loop.step_functions = run.loop.unwrapped.calls(run.model)
    if run.command == "fit":
        optimizers = run.make_optimizers()
        _warn_of_parameters_without_optimizer(run, optimizers)
        automatic = run.module.automatic_optimization
        if automatic != (run.mode == "automatic"):
            message = f"{type(run.module).__name__}.automatic_optimization became {automatic}"
            raise UsageError(f"{message} after fit had begun. Fix: set it in __init__")
        run.wrap_optimizers(optimizers)
        if not optimizers:
            warn("configure_optimizers returned None: nothing is stepped")
    load(run, start)


def _warn_of_parameters_without_optimizer(run: Run, optimizers: Sequence[Optimizer]) -> None:
    stepped, named = set(parameters_of(optimizers)), run.module.named_parameters()
    forgotten = [name for name, p in named if p.requires_grad and p not in stepped]
    if forgotten and stepped and run.world.rank == 0:
        message = f"{len(forgotten)} trainable parameters are in no optimizer, such as "
        message += f"{forgotten[0]}. Fix: give configure_optimizers all, or requires_grad_(False)"
        warn(message)


@contextmanager
def _exit_fails(run: Run) -> Iterator[None]:
    """Make an error of ``sys.exit(0)``, which would say that the run is done."""
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        *_, place = traceback.extract_tb(error.__traceback__)
        raise TrainingError(
            f"rank {run.world.rank} left the program before the run ended: {place.name} called "
            f"sys.exit({error.code!r}) in {place.filename}:{place.lineno}. Fix: "
            "trainer.should_stop = True to end training early, or raise an error"
        ) from error
