"""Going on from a checkpoint as if ``fit`` had not stopped: what is refused, what is loaded, and how an epoch is taken up within."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from geartrain.checkpoint.training_state import FORMAT, EpochStart, begin_epoch, named_parts, parameter_names, set_random
from geartrain.data.loaders import describe
from geartrain.data.sharding import set_order_seeds
from geartrain.errors import TrainingError, UsageError
from geartrain.metrics import torchmetrics as metric_objects

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: What is there in every file.
_KEYS = ("step", "epoch", "batch_idx", "validated", "batches_seen", "optimizers", "schedulers", "parts", "seeds", "ranks")

#: What schedulers change in an optimizer's groups.
_SCHEDULED = frozenset(("lr", "momentum", "betas"))

#: What a group holds beside its settings; QAdam counts its steps there.
_NO_SETTINGS = frozenset(("params", "step"))

#: The types of settings that can be compared.
_COMPARED = {bool, int, float, str, tuple, list, Counter}


@dataclass(slots=True)
class Resumed:
    """Where a run goes on, in the first epoch after a checkpoint."""

    #: The checkpoint's file; ``None`` if it was in memory.
    path: Path | None
    #: Batches of that epoch that were done.
    batch_idx: int
    #: Whether the validation that was due there was done.
    validated: bool
    #: This rank's random state there and at the epoch's beginning; ``None`` on a rank that the file knows nothing of.
    random: dict[str, Any] | None
    began: dict[str, Any] | None
    logs: dict[str, Any] | None
    metric_objects: dict[str, Any]

    def start(self, run: Run) -> None:
        """Go on between two epochs, before the next one's hooks are called."""
        if self.random is not None and not self.batch_idx:
            set_random(run, self.random)

    def begin_epoch(self, run: Run) -> EpochStart:
        """As :func:`begin_epoch`, where the epoch began before."""
        if self.began is not None:
            set_random(run, self.began)
        return begin_epoch(run)

    def skip(self, run: Run, batches: Iterator[Any]) -> None:
        """Take the batches that were done and leave everything as it was after them.

        Raises:
            TrainingError: the loader has fewer.
        """
        taken = sum(1 for _ in islice(batches, self.batch_idx))
        if taken < self.batch_idx:
            raise TrainingError(f"the checkpoint was saved after {self.batch_idx} batches of an epoch, and the loader has only {taken}")
        run.batch_idx = taken
        if self.random is not None:
            set_random(run, self.random)
        if self.logs is not None:
            run.logs.load_state_dict(self.logs)
        metric_objects.set_states(run.module, self.metric_objects)
        if run.module_hooks.training_epoch_end is not None and run.world.rank == 0:
            warnings.warn(f"training_epoch_end gets the outputs from batch {taken} of this epoch on: those before are gone", stacklevel=2)


def refuse(run: Run, state: dict[str, Any], path: Path) -> None:
    """Refuse a checkpoint from which this ``fit`` cannot go on, before anything is loaded: on every rank alike.

    Raises:
        TrainingError: it has weights only, is of a newer version, or of other optimizers or schedulers.
        UsageError: there is nothing left to do.
    """
    fit = state.get("fit")
    if not isinstance(fit, dict) or "format" not in fit:
        raise TrainingError(
            f"{path} holds weights, and not what a fit needs to go on. Fix: checkpoint={str(path)!r} (on the command line --checkpoint), "
            "which starts from the weights"
        )
    if fit["format"] != FORMAT:
        raise TrainingError(
            f"{path} was saved by geartrain {state.get('geartrain')}, whose format {fit['format']} this version does not know. "
            "Fix: that version, or start from the weights alone with checkpoint="
        )
    missing = [key for key in _KEYS if key not in fit]
    if missing:
        raise TrainingError(f"{path} is not whole: it has no {', '.join(map(repr, missing))}")
    options = run.plan.options
    for name, done, end in (("max_steps", fit["step"], options.max_steps), ("max_epochs", fit["epoch"], options.max_epochs)):
        if end != -1 and done >= end:
            unit = name.removeprefix("max_")
            raise UsageError(f"there is nothing left to do: {path} has {done} {unit} done, and {name}={end}. Fix: a larger {name}")
    total = run.batches["train"][0]
    if len(fit["ranks"]) == run.world.size and total is not None and fit["batch_idx"] > total:
        raise UsageError(
            f"{path} was saved after {fit['batch_idx']} batches of an epoch, which now has {total}. Fix: the same data and batch size"
        )
    _refuse_others("optimizer", fit["optimizers"], list(run.optimizers), path)
    _refuse_others("scheduler", fit["schedulers"], [schedule.scheduler for schedule in run.schedulers], path)


def _refuse_others(what: str, saved: list[dict[str, Any]], now: list[Any], path: Path) -> None:
    theirs, ours = [one["class"] for one in saved], [type(one).__name__ for one in now]
    if theirs != ours:
        raise TrainingError(
            f"{path} has the {what}s {', '.join(theirs) or 'none'}, and configure_optimizers made {', '.join(ours) or 'none'}. "
            "Fix: the same ones, or start from the weights alone with checkpoint="
        )


def load_fit(run: Run, fit: dict[str, Any], path: Path) -> None:
    """Give optimizers, schedulers, parts and counters their state; the weights are loaded.

    Raises:
        TrainingError: a state does not fit.
    """
    others = _other_settings(run, fit)
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        _refuse_other_parameters(optimizer, saved.get("parameters"), parameter_names(run, optimizer), path)
        with _telling(path, type(optimizer).__name__):
            load_optimizer(optimizer, saved["state"])
    anew = []
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        schedule.set_progress(saved.get("progress", (0, 0, None)))
        if saved["state"] is None:
            anew.append(type(schedule.scheduler).__name__)
            continue
        with _telling(path, type(schedule.scheduler).__name__):
            schedule.scheduler.load_state_dict(saved["state"])
    for stage, seeds in fit["seeds"].items():
        for loader, seed in zip(run.loaders.get(stage, ()), seeds, strict=False):
            set_order_seeds(loader, seed)
    run.step, run.epoch, run.batches_seen = fit["step"], fit["epoch"], fit["batches_seen"]
    mine = _of_this_rank(run, fit)
    run.reported.update(mine.get("metrics", {}))
    reported = mine.get("reported", {})
    run.logs.logged.update(reported.get("logged", {}))
    run.logs.prog_bar.update(reported.get("prog_bar", {}))
    run.logs.when.update(reported.get("when", {}))
    batch_idx = fit["batch_idx"] if len(fit["ranks"]) == run.world.size else _in_this_world(run, fit)
    run.resumed = Resumed(
        path if run.memory_checkpoint is None else None,
        batch_idx,
        fit["validated"],
        mine.get("random"),
        mine.get("began"),
        mine.get("logs"),
        mine.get("metric_objects", {}),
    )
    _load_parts(run, fit, mine.get("parts", {}), anew, path)
    if others:
        warnings.warn(
            f"{path} has {', '.join(others)}: the checkpoint's settings stand. Fix if unmeant: start from its weights with checkpoint= "
            "(on the command line --checkpoint)",
            stacklevel=2,
        )
    _warn_of_replay(run, batch_idx)


def _other_settings(run: Run, fit: dict[str, Any]) -> list[str]:
    """The settings of optimizers and schedulers that differ between a checkpoint and ``configure_optimizers``.

    In a world of another size rates may follow the number of ranks, so nothing is compared.
    """
    if run.world.rank or run.memory_checkpoint is not None or len(fit["ranks"]) != run.world.size:
        return []
    pairs: list[tuple[str, Any, Any]] = []
    moves = _SCHEDULED if run.schedulers else frozenset()
    for optimizer, saved in zip(run.optimizers, fit["optimizers"], strict=True):
        for theirs, ours in zip(saved["state"].get("param_groups", ()), optimizer.param_groups, strict=False):
            pairs += [
                (f"{type(optimizer).__name__}'s {name.removeprefix('initial_')}", theirs[name], ours[name])
                for name in theirs
                if name in ours and name not in _NO_SETTINGS and name not in moves
            ]
    for schedule, saved in zip(run.schedulers, fit["schedulers"], strict=True):
        kind, theirs, ours = type(schedule.scheduler), saved["state"] or {}, vars(schedule.scheduler)
        made_with = inspect.signature(kind).parameters.keys() - {"last_epoch"}
        pairs += [(f"{kind.__name__}'s {name}", theirs[name], ours[name]) for name in sorted(made_with & theirs.keys() & ours.keys())]
    # Several groups may differ alike.
    return list(dict.fromkeys(f"{what} {a} and not {b}" for what, a, b in pairs if {type(a), type(b)} <= _COMPARED and a != b))


def _refuse_other_parameters(optimizer: Optimizer, saved: list[str] | None, now: list[str], path: Path) -> None:
    """torch pairs state and parameters by their order, and looks at nothing else: not even at shapes.

    Args:
        saved: names, in order; ``None`` in files that have none.
    """
    if saved is None or saved == now:
        return
    index, was, here = next((i, a, b) for i, (a, b) in enumerate(zip_longest(saved, now, fillvalue="none")) if a != b)
    raise TrainingError(
        f"{path}: parameter {index} of {type(optimizer).__name__} was {was or 'one of no name'}, and is {here or 'one of no name'} now. "
        "Fix: the same parameters in the same order, or start from the weights alone with checkpoint="
    )


@contextmanager
def _telling(path: Path, what: str) -> Iterator[None]:
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
    """What the file has of this rank. In a world of another size that is its random state, if it was there, and rank 0's metrics."""
    ranks, rank = fit["ranks"], run.world.rank
    if len(ranks) == run.world.size:
        return dict(ranks[rank])
    kept = ranks[rank] if rank < len(ranks) else {}
    return {
        "random": kept.get("random"),
        "began": kept.get("began"),
        "metrics": ranks[0]["metrics"],
        "reported": ranks[0].get("reported", {}),
    }


def _in_this_world(run: Run, fit: dict[str, Any]) -> int:
    """After how many batches of this rank an epoch goes on that a world of another size began."""
    before, now, done = len(fit["ranks"]), run.world.size, fit["batch_idx"]
    total = run.batches["train"][0]
    batches: int = done * before // now
    batches = batches if total is None else min(batches, total)  # shards are padded: the smaller world's epoch may be shorter
    if done and run.world.rank == 0:
        warnings.warn(
            f"the checkpoint was saved by {before} ranks after {done} batches of an epoch, which {now} ranks go on with after {batches}: "
            "some of its samples may come twice or not at all, and its metrics are of what is left",
            stacklevel=2,
        )
    return batches


def _load_parts(run: Run, fit: dict[str, Any], own: dict[str, Any], anew: list[str], path: Path) -> None:
    """Give each part its state, and say whose is missing.

    Args:
        own: this rank's; empty in a world of another size.
        anew: what else begins anew.
    """
    shared, here = fit["parts"], named_parts(run.hooks.parts)
    elsewhere: list[str] = []
    known = {*shared, *(name for rank in fit["ranks"] for name in rank["parts"])}
    for name, part in here.items():
        if name in shared or name in own:
            with _telling(path, part.info.label):
                part.plugin.load_state_dict(own[name] if name in own else shared[name])
        else:
            (elsewhere if name in known else anew).append(part.info.label)
    absent = sorted(known - here.keys())
    facts = {
        f"it has state of {', '.join(absent)}, which this run does not have": absent,
        f"it has no state of {', '.join(anew)}: begun anew": anew,
        f"{', '.join(elsewhere)} keeps a state a rank, of {len(fit['ranks'])} ranks and not {run.world.size}: begun anew": elsewhere,
    }
    told = [fact for fact, names in facts.items() if names]
    if told and run.world.rank == 0:
        warnings.warn(f"{path}: {'; '.join(told)}", stacklevel=2)


def _warn_of_replay(run: Run, batch_idx: int) -> None:
    """Say where a loader may not give again what it gave."""
    loader = run.loaders["train"][0]
    one_shot, stream = isinstance(loader, Iterator), isinstance(getattr(loader, "dataset", None), IterableDataset)
    if run.world.rank == 0 and ((one_shot and (run.batches_seen or batch_idx)) or (stream and batch_idx)):
        what = "is an iterator, which goes on from where it stands" if one_shot else "cannot be told where to go on"
        warnings.warn(
            f"{describe(loader)} {what}: {batch_idx} batches are taken from it and thrown away. They are those that were trained on only "
            "if it gives the same again",
            stacklevel=2,
        )
