"""Save and load a checkpoint's ``"fit"``: everything but the weights that a ``fit`` needs to resume as if it had not stopped.

:func:`training_state` saves it; :func:`load_training_state`, :func:`begin_epoch` and :meth:`Resumed.skip` put it back.

Rank 0 writes one file. Weights, optimizers and schedulers in it are rank 0's: a strategy whose ranks differ in them keeps its own in
``state_dict()``, which is loaded last, on each rank its own. What else differs from rank to rank (state of parts, random generators,
metrics) reaches rank 0 by one ``broadcast`` a rank, the one collective that every strategy has.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from geartrain.data.loaders import describe
from geartrain.data.seeding import random_state, set_random_state
from geartrain.data.sharding import generators, order_seeds, set_order_seeds
from geartrain.errors import TrainingError, UsageError
from geartrain.hooks.plugin_info import LoadedPlugin, keeps_state
from geartrain.metrics.objects import libraries
from geartrain.module.nested import map_tensors, not_plain

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: The version of the format under ``"fit"``.
FORMAT = 1


# --- saving --------------------------------------------------------------------------------------------------------------


#: Settings that a scheduler moves: they differ from those in the code after each step.
_SCHEDULED = frozenset(("lr", "momentum", "betas"))
#: State of a group, not a setting; QAdam counts its steps there.
_NO_SETTINGS = frozenset(("params", "step"))
#: The types of settings that can be compared.
_COMPARED = {bool, int, float, str, tuple, list, Counter}


def training_state(run: Run, epochs: int) -> dict[str, Any]:
    """Return the state that a ``fit`` needs to resume from here. Every rank calls it.

    It costs ``world_size - 1`` broadcasts of one rank's state: about 10 KB of random state and its parts' ``state_dict()``, which
    travels to all ranks although only rank 0 keeps it, because no hook sends to one rank alone. A part that says ``same_on_all_ranks``
    sends nothing.

    Args:
        epochs: epochs done; ``run.epoch`` within an epoch.
    """
    within = epochs == run.epoch and run.batch_idx > 0
    shared, own = _states_of_parts(run)
    mine = {
        "parts": own,
        "random": random_now(run),
        "began": run.epoch_start if within else None,
        "logs": run.logs.state_dict(within),
        "metric_objects": {
            name: map_tensors(library.states(run.module), _to_cpu)
            for name, library in libraries().items()
            if within
        },
    }
    return {
        "format": FORMAT,
        "step": run.step,
        "epoch": epochs,
        "batch_idx": run.batch_idx if within else 0,
        "validated": within and run.stage == "validate",
        "batches_seen": run.batches_seen,
        "optimizers": [
            {**_named(optimizer), "parameters": parameter_names(run, optimizer)}
            for optimizer in run.optimizers
        ],
        "schedulers": [
            {**_named(schedule.scheduler), "progress": schedule.progress()}
            for schedule in run.schedulers
        ],
        "parts": shared,
        "seeds": {
            name: [order_seeds(loader) for loader in stage.loaders]
            for name, stage in run.stages.items()
        },
        "ranks": run.ranks.gather_states(run, mine),
    }


def _states_of_parts(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of parts by name: those that are the same on all ranks, and this rank's own.

    If ranks' weights differ, what follows from them does too (an average of them, a scaler's skipped steps): then each rank keeps all of
    its own, and rank 0's is for a world of another size.
    """
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    alike = _same_weights(run.hooks.parts)
    for name, part in named_parts(run.hooks.parts).items():
        state = _portable(part.plugin.state_dict(), part.info.label)
        if state is not None and _same_on_all_ranks(part):
            shared[name] = state
        if state is not None and not (alike and _same_on_all_ranks(part)):
            own[name] = state
    return shared, own


def named_parts(parts: tuple[LoadedPlugin, ...]) -> dict[str, LoadedPlugin]:
    """Return the parts that keep state, by name; the second of a name gets ``#2``, and so on."""
    found: dict[str, LoadedPlugin] = {}
    for part in parts:
        if keeps_state(part.plugin):
            name, number = part.info.name, 1
            while name in found:
                number += 1
                name = f"{part.info.name}#{number}"
            found[name] = part
    return found


def _same_on_all_ranks(part: LoadedPlugin) -> bool:
    return bool(getattr(part.plugin, "same_on_all_ranks", False))


def _same_weights(parts: tuple[LoadedPlugin, ...]) -> bool:
    """True if all ranks have the same weights: unless the strategy declares otherwise."""
    declared = [
        getattr(part.plugin, "capabilities", None) for part in parts if part.info.kind == "strategy"
    ]
    return all(one.get("identical_weights", True) for one in declared if isinstance(one, Mapping))


def _portable(state: Any, whose: str) -> Any:
    """Return a state on the CPU; ``None``, with a warning, if it could not be read again as data alone."""
    odd = not_plain(state)
    if odd is None:
        return map_tensors(state, _to_cpu)
    warnings.warn(
        f"{whose}: its state_dict() holds {odd}, which could not be read again as data alone, so checkpoints leave it out. "
        "Fix: tensors, numbers, strings, and lists, tuples and dicts of them",
        stacklevel=2,
    )
    return None


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _named(thing: Any) -> dict[str, Any]:
    """Return an optimizer's or scheduler's state, with its class for a check."""
    state = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else None
    if not isinstance(thing, Optimizer):
        state = _portable(state, type(thing).__name__)
    return {"class": type(thing).__name__, "state": state}


def parameter_names(run: Run, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, by whose order its state knows them; ``""`` for one that is not the module's."""
    named = {parameter: name for name, parameter in run.module.named_parameters()}
    return [
        named.get(parameter, "")
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


# --- loading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run resumes, in the first epoch after a checkpoint."""

    #: The checkpoint's file; ``None`` if it was in memory.
    path: Path | None
    #: Batches of that epoch that were done.
    batch_idx: int
    #: True if the checkpoint was saved at the end of the validation that was due there.
    validated: bool
    #: The file's state of this rank; little if the world has another size.
    rank: dict[str, Any]

    def skip(self, run: Run, batches: Iterator[Any]) -> None:
        """Take the batches that were done and leave everything as it was after them.

        Raises:
            TrainingError: the loader has fewer.
        """
        run.batch_idx = sum(1 for _ in islice(batches, self.batch_idx))
        if run.batch_idx < self.batch_idx:
            raise TrainingError(
                f"the checkpoint was saved after {self.batch_idx} batches of an epoch, and the loader has only {run.batch_idx}"
            )
        if self.rank.get("random") is not None:
            set_random(run, self.rank["random"])
        run.logs.resume_epoch(self.rank["logs"])
        for name, library in libraries().items():
            library.set_states(run.module, self.rank.get("metric_objects", {}).get(name, {}))
        if run.module_hooks.has("training_epoch_end") and run.world.rank == 0:
            warnings.warn(
                f"training_epoch_end gets the outputs from batch {run.batch_idx} of this epoch on: those before are gone",
                stacklevel=2,
            )


def begin_epoch(run: Run) -> None:
    """Note where the generators stand as an epoch begins, from where its batches can be replayed.

    In the first epoch of a run that resumes they are first put where they stood then.
    """
    if run.resumed is not None:
        began = run.resumed.rank.get("began" if run.resumed.batch_idx else "random")
        if began is not None:
            set_random(run, began)
    run.epoch_start = random_now(run)


def refuse(run: Run, state: dict[str, Any], path: Path) -> None:
    """Refuse a checkpoint from which this ``fit`` cannot resume, before anything is loaded: on every rank alike.

    Raises:
        TrainingError: it has weights only, is of a newer version, or of other optimizers or schedulers.
        UsageError: there is nothing left to do.
    """
    fit = state.get("fit")
    if not isinstance(fit, dict) or "format" not in fit:
        raise TrainingError(
            f"{path} holds weights, and not what a fit needs to resume. Fix: checkpoint={str(path)!r} (on the command line --checkpoint), "
            "which starts from the weights"
        )
    if fit["format"] != FORMAT:
        raise TrainingError(
            f"{path} was saved by geartrain {state.get('geartrain')}, whose format {fit['format']} this version does not know. "
            "Fix: that version, or start from the weights alone with checkpoint="
        )
    options = run.plan.options
    for name, done, end in (
        ("max_steps", fit["step"], options.max_steps),
        ("max_epochs", fit["epoch"], options.max_epochs),
    ):
        if end != -1 and done >= end:
            unit = name.removeprefix("max_")
            raise UsageError(
                f"there is nothing left to do: {path} has {done} {unit} done, and {name}={end}. Fix: a larger {name}"
            )
    total = run.stages["train"].batches[0]
    if len(fit["ranks"]) == run.world.size and total is not None and fit["batch_idx"] > total:
        raise UsageError(
            f"{path} was saved after {fit['batch_idx']} batches of an epoch, which now has {total}. Fix: the same data and batch size"
        )
    _refuse_others("optimizer", fit["optimizers"], list(run.optimizers), path)
    _refuse_others(
        "scheduler", fit["schedulers"], [schedule.scheduler for schedule in run.schedulers], path
    )


def _refuse_others(what: str, saved: list[dict[str, Any]], now: list[Any], path: Path) -> None:
    theirs, ours = [one["class"] for one in saved], [type(one).__name__ for one in now]
    if theirs != ours:
        raise TrainingError(
            f"{path} has the {what}s {', '.join(theirs) or 'none'}, and configure_optimizers made {', '.join(ours) or 'none'}. "
            "Fix: the same ones, or start from the weights alone with checkpoint="
        )


def load_training_state(run: Run, fit: dict[str, Any], path: Path) -> None:
    """Give optimizers, schedulers, parts and counters their state; the weights are loaded.

    Raises:
        TrainingError: a state does not fit.
    """
    others = _other_settings(run, fit)
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        _refuse_other_parameters(
            optimizer, saved["parameters"], parameter_names(run, optimizer), path
        )
        with _named_in_errors(path, type(optimizer).__name__):
            load_optimizer(optimizer, saved["state"])
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        schedule.set_progress(saved["progress"])
        if saved["state"] is not None:
            with _named_in_errors(path, type(schedule.scheduler).__name__):
                schedule.scheduler.load_state_dict(saved["state"])
    for name, stage in run.stages.items():
        for loader, seed in zip(stage.loaders, fit["seeds"].get(name, ()), strict=False):
            set_order_seeds(loader, seed)
    run.step, run.epoch, run.batches_seen = fit["step"], fit["epoch"], fit["batches_seen"]
    mine = _of_this_rank(run, fit)
    run.logs.load_state_dict(mine["logs"])
    batch_idx = _batches_in_this_world(run, fit)
    run.resumed = Resumed(
        path if run.memory_checkpoint is None else None, batch_idx, fit["validated"], mine
    )
    _load_parts(run, fit, mine["parts"], path)
    if others:
        warnings.warn(
            f"{path} has {', '.join(others)}: the checkpoint's settings stand. Fix if unmeant: start from its weights with checkpoint= "
            "(on the command line --checkpoint)",
            stacklevel=2,
        )
    _warn_of_replay(run, batch_idx)


def _warn_of_replay(run: Run, batch_idx: int) -> None:
    """Warn if the training loader may not repeat its batches."""
    loader = run.stages["train"].loaders[0]
    one_shot, stream = (
        isinstance(loader, Iterator),
        isinstance(getattr(loader, "dataset", None), IterableDataset),
    )
    if run.world.rank == 0 and (
        (one_shot and (run.batches_seen or batch_idx)) or (stream and batch_idx)
    ):
        what = (
            "is an iterator, which continues from its own position"
            if one_shot
            else "cannot be told where to resume"
        )
        warnings.warn(
            f"{describe(loader)} {what}: {batch_idx} batches are taken from it and thrown away. They are those that were trained on only "
            "if it gives the same again",
            stacklevel=2,
        )


def _other_settings(run: Run, fit: dict[str, Any]) -> list[str]:
    """Return the settings of optimizers and schedulers that differ between a checkpoint and ``configure_optimizers``.

    In a world of another size rates may follow the number of ranks, so nothing is compared.
    """
    if run.world.rank or run.memory_checkpoint is not None or len(fit["ranks"]) != run.world.size:
        return []
    pairs: list[tuple[str, Any, Any]] = []
    moves = _SCHEDULED if run.schedulers else frozenset()
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        for theirs, ours in zip(
            saved["state"].get("param_groups", ()), optimizer.param_groups, strict=False
        ):
            pairs += [
                (
                    f"{type(optimizer).__name__}'s {name.removeprefix('initial_')}",
                    theirs[name],
                    ours[name],
                )
                for name in theirs
                if name in ours and name not in _NO_SETTINGS and name not in moves
            ]
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        kind, theirs, ours = (
            type(schedule.scheduler),
            saved["state"] or {},
            vars(schedule.scheduler),
        )
        made_with = inspect.signature(kind).parameters.keys() - {"last_epoch"}
        pairs += [
            (f"{kind.__name__}'s {name}", theirs[name], ours[name])
            for name in sorted(made_with & theirs.keys() & ours.keys())
        ]
    # Several groups may differ alike.
    return list(
        dict.fromkeys(
            f"{what} {a} and not {b}"
            for what, a, b in pairs
            if {type(a), type(b)} <= _COMPARED and a != b
        )
    )


def _refuse_other_parameters(
    optimizer: Optimizer, saved: list[str], now: list[str], path: Path
) -> None:
    """torch pairs state and parameters by their order, and looks at nothing else: not even at shapes."""
    if saved == now:
        return
    index, was, here = next(
        (i, a, b) for i, (a, b) in enumerate(zip_longest(saved, now, fillvalue="none")) if a != b
    )
    raise TrainingError(
        f"{path}: parameter {index} of {type(optimizer).__name__} was {was or 'one of no name'}, and is {here or 'one of no name'} now. "
        "Fix: the same parameters in the same order, or start from the weights alone with checkpoint="
    )


@contextmanager
def _named_in_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TrainingError(f"{path}: the state of {what} does not fit: {error}") from error


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """``load_state_dict``, with groups and state in the same dicts as before: a scheduler was made with them, and so was an optimizer that
    a strategy has put another in front of. torch puts new ones in their place, and the old ones would hear of no step."""
    groups, slots = list(optimizer.param_groups), optimizer.state
    optimizer.load_state_dict(state)
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


def _of_this_rank(run: Run, fit: dict[str, Any]) -> dict[str, Any]:
    """Return the file's state of this rank; in a world of another size its random state, if the rank existed, and rank 0's metrics."""
    ranks, rank = fit["ranks"], run.world.rank
    if len(ranks) == run.world.size:
        return dict(ranks[rank])
    kept = ranks[rank] if rank < len(ranks) else {}
    logs = {**ranks[0]["logs"], "epoch": None}
    return {"random": kept.get("random"), "began": kept.get("began"), "logs": logs, "parts": {}}


def _batches_in_this_world(run: Run, fit: dict[str, Any]) -> int:
    """Return after how many batches of this rank the epoch resumes, which a world of another size may have begun."""
    before, now, done = len(fit["ranks"]), run.world.size, int(fit["batch_idx"])
    if before == now:
        return done
    total = run.stages["train"].batches[0]
    batches = done * before // now
    batches = (
        batches if total is None else min(batches, total)
    )  # shards are padded: the smaller world's epoch may be shorter
    if done and run.world.rank == 0:
        warnings.warn(
            f"the checkpoint was saved by {before} ranks after {done} batches of an epoch, which {now} ranks resume after {batches}: "
            "some of its samples may come twice or not at all, and its metrics cover the rest",
            stacklevel=2,
        )
    return batches


def _load_parts(run: Run, fit: dict[str, Any], own: dict[str, Any], path: Path) -> None:
    """Give each part its state, this rank's own or the shared one, and warn of states and parts that have no counterpart."""
    shared, here = fit["parts"], named_parts(run.hooks.parts)
    known = {*shared, *(name for rank in fit["ranks"] for name in rank["parts"])}
    stateless = []
    for name, part in here.items():
        if name in shared or name in own:
            with _named_in_errors(path, part.info.label):
                part.plugin.load_state_dict(own[name] if name in own else shared[name])
        else:
            ranks = (
                f" (it has one for each of {len(fit['ranks'])} ranks, not {run.world.size})"
                if name in known
                else ""
            )
            stateless.append(
                f"no saved state for {part.info.label}{ranks}, which starts from scratch"
            )
    absent = sorted(known - here.keys())
    told = stateless + (
        [f"it has state of {', '.join(absent)}, which this run does not have"] if absent else []
    )
    if told and run.world.rank == 0:
        warnings.warn(f"{path}: {'; '.join(told)}", stacklevel=2)


# --- random generators ---------------------------------------------------------------------------------------------------


def _loaders(run: Run) -> list[Any]:
    return [loader for name in ("train", "validate") for loader in run.stages[name].loaders]


def random_now(run: Run) -> dict[str, Any]:
    """Return where this rank's generators stand, the global ones and those of loaders, and which loaders' persistent workers run."""
    loaders = _loaders(run)
    own = [generator.get_state() for loader in loaders for generator in generators(loader)]
    started = [
        isinstance(loader, DataLoader) and loader._iterator is not None for loader in loaders
    ]
    return {
        **random_state(run.device, every=run.plan.layout.devices_per_process > 1),
        "loaders": own,
        "workers": started,
    }


def set_random(run: Run, state: dict[str, Any]) -> None:
    """Put all generators where :func:`random_now` found them."""
    loaders = _loaders(run)
    for loader, started in zip(loaders, state.get("workers", ()), strict=False):
        if (
            started
            and isinstance(loader, DataLoader)
            and loader.persistent_workers
            and loader._iterator is None
        ):
            iter(
                loader
            )  # starts them, for which torch draws a seed: now, and not after the generators have been set
    set_random_state(run.device, state)
    own = [generator for loader in loaders for generator in generators(loader)]
    if len(own) != len(state["loaders"]):
        warnings.warn(
            f"the loaders have {len(own)} generators, and had {len(state['loaders'])}: their order starts from scratch",
            stacklevel=2,
        )
        return
    for generator, numbers in zip(own, state["loaders"], strict=True):
        generator.set_state(numbers)
