"""Save and load a checkpoint's ``"fit"``: all that ``fit`` needs to resume, except the weights.

:func:`training_state` saves it; :func:`load_training_state`, :func:`restore_random_state` and
:meth:`Resumed.skip` restore it.

Rank 0 writes one file, with its own weights, optimizers and schedulers. If a strategy's ranks
differ in them, the strategy keeps each rank's in its ``state_dict()``, which is loaded last. Other
state of each rank (of parts, random generators, metrics) reaches rank 0 by one ``broadcast`` a
rank, the one collective that every strategy has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from geartrain.data.indices import IndexedBatches
from geartrain.data.loaders import describe
from geartrain.data.seeding import random_state, set_random_state
from geartrain.data.stage import Stage, has_generator
from geartrain.errors import TrainingError, UsageError, warn
from geartrain.errors.distributions import import_from, import_optional
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo, keeps_state
from geartrain.metrics.objects import libraries
from geartrain.module.module import plain_name
from geartrain.module.nested import map_tensors, not_plain

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: The version of the format under ``"fit"``.
FORMAT = 1


def training_state(run: Run, epochs: int) -> dict[str, Any]:
    """Return the state that a ``fit`` needs to resume from here. Every rank calls it.

    Each rank but rank 0 broadcasts its state, because no hook sends to one rank alone: about 10 KB
    of random state, and the ``state_dict()`` of each part without ``same_on_all_ranks``.

    Args:
        epochs: epochs done; ``run.epoch`` within an epoch.
    """
    within = epochs == run.epoch and run.batch_idx > 0
    loader: Any = next(iter(run.stages["train"].loaders), None)  # none after ddp_spawn
    validates = run.stage == "validate" and run.logs.open  # a resume repeats that validation
    # A DataLoader starts each epoch at its first batch; another loader may keep its position.
    resumes = keeps_state(loader) and (within or not isinstance(loader, DataLoader))
    shared, unshared = _states_of_parts(run)
    objects = {name: library.states(run.module) for name, library in libraries().items() if within}
    rank_state = {
        "parts": unshared,
        "random": run.loop.before_validation if validates else random_now(run),
        "began": run.loop.epoch_start if within else None,
        "logs": run.logs.state_dict(within),
        "metric_objects": map_tensors(objects, _to_cpu),
        "loader": _portable(loader.state_dict(), describe(loader)) if resumes else None,
    }
    return {
        "format": FORMAT,
        "step": run.step,
        "epoch": epochs,
        "batch_idx": run.batch_idx if within else 0,
        "batch_size": run.plan.loader_batch_size,
        "validated": within and run.stage == "validate" and not validates,
        "batches_seen": run.loop.batches_seen,
        "optimizers": [
            {**_named(o), "parameters": parameter_names(run, o)} for o in run.optimizers
        ],
        "schedulers": [
            {**_named(s.scheduler), "of": _optimizer_of(run, s), "progress": s.progress()}
            for s in run.schedulers
        ],
        "parts": shared,
        "left_out": [n for n in named_parts(run) if n not in {*shared, *unshared}],
        "seeds": {name: stage.seeds() for name, stage in run.stages.items()},
        "ranks": run.coordinator.gather_states(run, rank_state),
    }


def _states_of_parts(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of parts by name: those that are equal on all ranks, and this rank's own.

    If the ranks' weights differ, states that follow from them also do (an average, a scaler's
    skipped steps). Then each rank keeps all of its own; a world of another size uses rank 0's.
    """
    shared: dict[str, Any] = {}
    unshared: dict[str, Any] = {}
    alike = run.hooks.strategy_can("identical_weights")
    for name, part in named_parts(run).items():
        state = _portable(part.plugin.state_dict(), part.info.label)
        same = bool(getattr(part.plugin, "same_on_all_ranks", False))
        is_data = part.plugin is run.loop.source.datamodule  # rank 0's is for other worlds
        if state is not None and (is_data or same):
            shared[name] = state
        if state is not None and (is_data or not (alike and same)):
            unshared[name] = state
    return shared, unshared


def named_parts(run: Run) -> dict[str, LoadedPlugin]:
    """Return the parts that keep state, by name and ``state_suffix``; a second one has ``#2``."""
    found: dict[str, LoadedPlugin] = {}
    info = PluginInfo("datamodule", "core", None, None, "datamodule=")
    for part in (*run.hooks.parts, LoadedPlugin(info, run.loop.source.datamodule)):
        if keeps_state(part.plugin):
            key = part.info.name + getattr(part.plugin, "state_suffix", "")
            numbered = (f"{key}#{n}" if n > 1 else key for n in count(1))
            found[next(name for name in numbered if name not in found)] = part
    return found


def _portable(state: Any, owner: str) -> Any:
    """Return a state on the CPU; ``None``, with a warning, if a checkpoint cannot hold it."""
    unsupported = not_plain(state)
    if unsupported is None:
        return map_tensors(state, _to_cpu)
    message = f"{owner}: its state_dict() holds {unsupported}, which cannot be read as data alone"
    hint = "tensors, numbers, strings, and lists, tuples and dicts of them"
    warn(f"{message}, so checkpoints leave it out. Fix: {hint}")
    return None


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _optimizer_of(run: Run, schedule: Any) -> str:
    """Return which of several optimizers a scheduler is of, in words."""
    groups = getattr(getattr(schedule.scheduler, "optimizer", None), "param_groups", ())
    for index, optimizer in enumerate(run.optimizers if len(run.optimizers) > 1 else ()):
        if any(a is b for a in groups for b in optimizer.param_groups):
            return f" of optimizer {index}"
    return ""


def _named(thing: Any) -> dict[str, Any]:
    """Return an optimizer's or scheduler's state, with its class for a check."""
    state = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else None
    if not isinstance(thing, Optimizer):
        state = _portable(state, type(thing).__name__)
    return {"class": type(thing).__name__, "state": state}


def parameter_names(run: Run, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; raise if it has others."""
    named = {p: plain_name(name) for name, p in run.module.named_parameters()}
    names = [named.get(p, "") for group in optimizer.param_groups for p in group["params"]]
    if "" in names:
        owner = f"{type(optimizer).__name__}, which {type(run.module).__name__} does not have"
        message = f"no checkpoint could restore parameter {names.index('')} of {owner}"
        raise TrainingError(f"{message}. Fix: register it in __init__, and change it in place")
    return names


@dataclass(frozen=True, slots=True)
class Resumed:
    """The position where a run resumes, in the first epoch after a checkpoint."""

    #: The checkpoint's file; ``None`` if it was in memory.
    path: Path | None
    #: Batches of that epoch that were done.
    batch_idx: int
    #: The file's state of this rank; only a part of it if the world has another size.
    rank: dict[str, Any]

    def skip(self, run: Run, batches: Iterator[Any]) -> bool:
        """Skip the batches that were done, and restore the state after them; False if none was."""
        if not self.batch_idx:
            run.logs.resume_epoch(self.rank["logs"])  # ranks may be more than batches were done
            return False
        stage = run.stages["train"]
        run.batch_idx = stage.first + sum(1 for _ in islice(batches, self.batch_idx - stage.first))
        stage.first = 0
        if run.batch_idx < self.batch_idx:
            raise TrainingError(
                f"the checkpoint was saved after {self.batch_idx} batches of an epoch, "
                f"and the loader has only {run.batch_idx}"
            )
        if self.rank.get("random") is not None:
            set_random(run, self.rank["random"])
        run.logs.resume_epoch(self.rank["logs"])
        for name, library in libraries().items():
            library.set_states(run.module, self.rank.get("metric_objects", {}).get(name, {}))
        return True


def restore_random_state(run: Run) -> None:
    """Record the random state at the beginning of an epoch, so that its batches can be replayed.

    In the first epoch of a run that resumes, first restore the state that was recorded then.
    """
    if run.loop.resumed is not None:
        began = run.loop.resumed.rank.get("began" if run.loop.resumed.batch_idx else "random")
        if began is not None:
            set_random(run, began)
    run.loop.epoch_start = random_now(run)


def check_resumable(run: Run, state: dict[str, Any], path: Path, may_be_done: bool) -> None:
    """Refuse a checkpoint from which this ``fit`` cannot resume, on every rank, before loading it.

    Raises:
        TrainingError: it has only weights, a newer format, or other optimizers or schedulers.
        UsageError: there is nothing left to do.
    """
    fit = state.get("fit")
    if not isinstance(fit, dict) or "format" not in fit:
        raise TrainingError(
            f"{path} has weights, but not the state that a fit needs to resume. Fix: start from "
            f"the weights, with fit(..., checkpoint={str(path)!r}), --checkpoint on the command "
            "line, or MyModule.load_from_checkpoint(FILE)"
        )
    if fit["format"] != FORMAT:
        raise TrainingError(
            f"{path} was saved by geartrain {state.get('geartrain')}, whose format {fit['format']} "
            "this version does not know. Fix: install that version, or use checkpoint= for weights"
        )
    options = run.plan.options
    for name, done, end in (
        ("max_steps", fit["step"], options.max_steps),
        ("max_epochs", fit["epoch"], options.max_epochs),
    ):
        if end == -1 or done < end or (done == end and fit["batch_idx"]):  # the epoch's end is left
            continue
        message = f"there is nothing left to do: {path} has {done} {name.removeprefix('max_')} done"
        if done > end or not may_be_done:
            raise UsageError(f"{message}, and {name}={end}. Fix: use a larger {name}")
        if run.world.rank == 0:
            warn(f"{message}, and {name}={end}. Nothing is trained")
    total, same_size = run.stages["train"].batches[0], _has_same_batches(run, fit)
    again = options.reload_dataloaders_every_n_epochs  # the loaders may be those of another epoch
    if same_size and not again and total is not None and fit["batch_idx"] > total:
        raise UsageError(
            f"{path} was saved after {fit['batch_idx']} batches of an epoch, which now has "
            f"{total}. Fix: use the same data and batch size"
        )
    optimizers = [type(optimizer).__name__ for optimizer in run.optimizers]
    _refuse_others(path, "optimizer {}", [o["class"] for o in fit["optimizers"]], optimizers)
    schedulers = [type(s.scheduler).__name__ + _optimizer_of(run, s) for s in run.schedulers]
    saved = [item["class"] + item.get("of", "") for item in fit["schedulers"]]
    _refuse_others(path, "scheduler {}", saved, schedulers)


def _refuse_others(path: Path, kind: str, saved: list[str], current: list[str]) -> None:
    """Refuse others than the saved ones: states are paired with them by their order alone."""
    for index, (old, new) in enumerate(zip_longest(saved, current, fillvalue="none")):
        if old != new:
            message = f"{path}: {kind.format(index)} was {old}, and is {new} now. Fix: use the same"
            hint = "in the same order, or start from the weights alone with checkpoint="
            raise TrainingError(f"{message} {hint}")


def load_training_state(run: Run, fit: dict[str, Any], path: Path) -> None:
    """Load the state of optimizers, schedulers, parts and counters; the weights are loaded."""
    if other_settings := import_optional("geartrain_callbacks.other_settings"):
        other_settings.warn_of(run, fit, path)
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        kind, names = f"parameter {{}} of {saved['class']}", parameter_names(run, optimizer)
        _refuse_others(path, kind, saved["parameters"], names)
        with _named_in_errors(path, saved["class"]):
            load_optimizer(optimizer, saved["state"])
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        schedule.set_progress(saved["progress"])
        with _named_in_errors(path, saved["class"]):
            if saved["state"] is None:
                raise ValueError("the file has none. Fix: give it a state_dict() of plain values")
            schedule.scheduler.load_state_dict(saved["state"])
    for name, stage in run.stages.items():
        stage.set_seeds(fit["seeds"].get(name, []))
    run.step, run.epoch = fit["step"], fit["epoch"]
    run.loop.batches_seen = fit["batches_seen"]
    ranks, size = fit["ranks"], run.world.data_size
    parts = ranks[run.world.data_rank]["parts"] if len(ranks) == size else {}
    _load_parts(run, fit, parts, path)  # first: it may make the loaders again
    if _has_same_batches(run, fit):
        rank_state, batch_idx = ranks[run.world.data_rank], int(fit["batch_idx"])
    else:
        wanted = f"the reader of a checkpoint of {len(ranks)} ranks or of other batches"
        other_size = import_from("geartrain_parallel.other_size", wanted)
        rank_state, batch_idx = other_size.position(run, fit)
    run.logs.load_state_dict(rank_state["logs"])
    file = path if run.loop.memory_checkpoint is None else None
    run.loop.resumed = Resumed(file, batch_idx, rank_state)
    stage, position = run.stages["train"], rank_state.get("loader")
    loader = stage.loaders[0]
    # The last of the batches that were done is read again: then the loader has drawn its order.
    stage.first = max(batch_idx - 1, 0)
    counted = isinstance(getattr(loader, "batch_sampler", None), IndexedBatches)
    if position is not None and keeps_state(loader) and not counted:
        loader.load_state_dict(position)
        stage.done = batch_idx
    elif keeps_state(loader) and isinstance(loader, DataLoader) and not batch_idx:
        iter(loader)  # a DataModule may have set a position, which the epoch must not have
    else:
        _warn_of_replay(run, batch_idx)
    run.loop.validated = (run.epoch, batch_idx) if fit["validated"] else None


def _has_same_batches(run: Run, fit: dict[str, Any]) -> bool:
    """True if ``batch_idx`` counts batches of the same samples as in this run."""
    same_size = not fit["batch_idx"] or fit["batch_size"] == run.plan.loader_batch_size
    return same_size and len(fit["ranks"]) == run.world.data_size


def _warn_of_replay(run: Run, batch_idx: int) -> None:
    """Warn if a loader may not repeat its batches, or the random numbers in its workers."""
    for loader in run.stages["train"].single_loaders() if run.world.rank == 0 else ():
        one_shot = isinstance(loader, Iterator)
        stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        persist = stream and run.epoch > 0 and getattr(loader, "persistent_workers", False)
        if persist or (stream and batch_idx) or (one_shot and (batch_idx or run.loop.batches_seen)):
            message = "cannot be told where to resume"
            if persist:
                message = "has persistent workers, whose random numbers start again"
            if one_shot:
                message = "is an iterator, which continues from its own position"
            message = f"{describe(loader)} {message}: {batch_idx} batches are taken from it and"
            hint = "They are those that were trained on only if it gives the same again"
            warn(f"{message} thrown away. {hint}")
    drawn = next((o for o in _loaders(run) if has_generator(getattr(o, "dataset", None))), None)
    if drawn is not None and run.epoch and run.world.rank == 0:
        message = f"the dataset of {describe(drawn)} has a random generator, which starts again"
        warn(f"{message}. Fix: draw from the generators of torch, NumPy and random")


@contextmanager
def _named_in_errors(path: Path, owner: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TrainingError(f"{path}: the state of {owner} does not fit: {error}") from error


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call ``load_state_dict``, and keep the optimizer's dicts of groups and state.

    torch would replace them. A scheduler, or an optimizer that a strategy has wrapped, holds the
    old ones and would see no later step.
    """
    groups, slots = list(optimizer.param_groups), optimizer.state
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        saved = state["state"].get(number, {})
        for key, value in optimizer.state.get(parameter, {}).items():
            # torch rounds a number, as NAdam's mu_product, to the dtype of the parameter.
            if isinstance(value, torch.Tensor) and value.ndim == 0 and key in saved:
                optimizer.state[parameter][key] = saved[key].to(value.device, copy=True)
    for index, (old, new) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        if old is not new:
            old.clear()
            old.update(new)
            optimizer.param_groups[index] = old
    if optimizer.state is not slots:
        new_slots = dict(optimizer.state)
        slots.clear()
        slots.update(new_slots)
        optimizer.state = slots


def _load_parts(run: Run, fit: dict[str, Any], unshared: dict[str, Any], path: Path) -> None:
    """Load each part's state, this rank's own or the shared one; warn if either is missing."""
    shared, parts = fit["parts"], named_parts(run)
    known = {*shared, *(name for rank in fit["ranks"] for name in rank["parts"])}
    stateless: list[str] = []
    lost, new = known - parts.keys(), parts.keys() - known
    for kind in {name.partition(";")[0] for name in new}:  # a part may have other options
        was, present = ([n for n in names if n.partition(";")[0] == kind] for names in (lost, new))
        if len(was) == len(present) == 1:
            parts[was[0]] = parts.pop(present[0])
    for name, part in parts.items():
        if name in shared or name in unshared:
            with _named_in_errors(path, part.info.label):
                part.plugin.load_state_dict(unshared[name] if name in unshared else shared[name])
            if part.plugin is run.loop.source.datamodule:  # its loaders may depend on its state
                run.remake_loaders(run.epoch, ("train", "validate"))
        else:
            total, size = len(fit["ranks"]), run.world.data_size
            ranks = f" (it has one for each of {total} ranks, not {size})"
            message = f"no saved state for {part.info.label}{ranks if name in known else ''}"
            stateless.append(f"{message}, which starts from scratch")
    if absent := sorted(known - parts.keys()):
        stateless.append(f"it has state of {', '.join(absent)}, which this run does not have")
    if stateless and run.world.rank == 0:
        warn(f"{path}: {'; '.join(stateless)}")


def _loaders(run: Run) -> list[Any]:
    return [*run.stages["train"].single_loaders(), *run.stages["validate"].single_loaders()]


def random_now(run: Run) -> dict[str, Any]:
    """Return this rank's random state, and which loaders' persistent workers run."""
    loaders = _loaders(run)
    states = [generator.get_state() for generator in Stage(loaders).generators()]
    started = [isinstance(each, DataLoader) and each._iterator is not None for each in loaders]
    everywhere = random_state(run.device, every=run.plan.layout.devices_per_process > 1)
    return {**everywhere, "loaders": states, "workers": started}


def set_random(run: Run, state: dict[str, Any]) -> None:
    """Restore the state that :func:`random_now` returned."""
    loaders = _loaders(run)
    for loader, started in zip(loaders, state.get("workers", ()), strict=False):
        persistent = isinstance(loader, DataLoader) and loader.persistent_workers
        if started and persistent and loader._iterator is None:
            iter(loader)  # start workers before the generators are set: torch draws a seed
    set_random_state(run.device, state)
    found, saved = list(Stage(loaders).generators()), state["loaders"]
    if len(found) != len(saved):
        message = f"the loaders have {len(found)} generators, and had {len(saved)}"
        warn(f"{message}: their order starts from scratch")
        return
    for generator, numbers in zip(found, saved, strict=True):
        generator.set_state(numbers)
