"""The loaders of a run: made before it, and again if a plugin asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from geartrain.checkpoint.training_state import set_random
from geartrain.data.loaders import describe, each_loader, end_workers, loader_batch_size
from geartrain.data.rows import with_rows_at_once
from geartrain.data.stage import Stage, with_indexed_batches
from geartrain.errors import UsageError, warn
from geartrain.loop.step_forwarder import check_loader_count

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: command -> the stages whose loaders it needs.
_STAGES = {"fit": ("train", "validate")} | {s: (s,) for s in ("validate", "test", "predict")}


def set_up_loaders(run: Run, stages: Sequence[str] | None = None) -> None:
    """Make the loaders of the command's stages, or of some, with this rank's part of the samples.

    Raises:
        TrainingError: a loader is empty, or ranks have different training loaders.
        UsageError: a stage has no loader, or loaders that cannot be used.
    """
    source = run.loop.source
    for stage in stages or _STAGES[run.command]:
        limit = run.plan.options.limit(stage)
        loaders = [] if limit == 0 else source.loaders(stage, run.module)
        run.coordinator.check_loaders(run, stage, len(loaders))
        is_optional = stage == "validate" and run.command == "fit"
        validates = callable(getattr(run.module, "validation_step", None))
        if is_optional and loaders and not validates:
            problem = f"{type(run.module).__name__} has no validation_step"
            warn(f"{problem}: its {describe(loaders[0])} is not used")
            loaders = []
        if is_optional and any(isinstance(loader, Iterator) for loader in loaders):
            message = "the validation loader is an iterator, which only one validation can read"
            raise UsageError(f"{message}. Fix: use a DataLoader or a list")
        if limit == 0 and not is_optional:
            name = "val" if stage == "validate" else stage
            raise UsageError(f"limit_{name}_batches=0 leaves nothing to {stage}.")
        if not loaders and not is_optional:
            raise source.missing(stage)
        if loaders and stage != "train":
            check_loader_count(run.module, stage, len(loaders))
        loaders = [each_loader(loader, partial(_sharded, run, stage)) for loader in loaders]
        counted = Stage.of(loaders, stage, limit)
        run.stages[stage] = run.coordinator.count_batches(run, stage, counted)
    size = loader_batch_size(run.stages["train"].loaders[0]) if run.command == "fit" else None
    if size is not None:  # of the loader on this rank, which may be another than the user's
        run.plan = run.trainer.plan = replace(run.plan, loader_batch_size=size)


def _sharded(run: Run, stage: str, loader: Iterable[Any]) -> Iterable[Any]:
    shard: Iterable[Any] = run.hooks.shard_dataloader(run=run, loader=loader, stage=stage)
    if run.command == "fit":
        shard = with_indexed_batches(shard, run.plan.resumes)
    shard = with_rows_at_once(shard)
    return shard


def end_all_workers(run: Run) -> None:
    """End the persistent workers of all loaders."""
    for loader in chain.from_iterable(stage.single_loaders() for stage in run.stages.values()):
        end_workers(loader)


def remake_loaders(
    run: Run, epoch: int, stages: Sequence[str], random: dict[str, Any] | None
) -> None:
    """Make the loaders again, as :meth:`geartrain.Run.remake_loaders` says."""
    if random is not None:
        set_random(run, random)
    end_all_workers(run)
    current, before = run.epoch, {name: stage.seeds() for name, stage in run.stages.items()}
    run.epoch = epoch  # the methods may read trainer.current_epoch
    set_up_loaders(run, stages)
    run.epoch = current
    for name, seeds in before.items():  # a strategy draws a new seed if the plan has none
        run.stages[name].set_seeds(seeds)
    run.stages["train"].set_epoch(current)
    run.logs.forget_loaders()
