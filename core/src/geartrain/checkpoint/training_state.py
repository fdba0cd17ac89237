"""What a checkpoint holds under ``"fit"``: all that a ``fit`` needs, beside the weights, to go on as if it had not stopped.

Rank 0 writes one file. Weights, optimizers and schedulers in it are rank 0's: a strategy whose ranks differ in them keeps its own in
``state_dict()``, which is loaded last, on each rank its own. What else differs from rank to rank (state of parts, random generators,
metrics) reaches rank 0 by one ``broadcast`` a rank, the one collective that every strategy has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from geartrain.data.seeding import random_state, set_random_state
from geartrain.data.sharding import generators, order_seeds
from geartrain.hooks.plugin_info import LoadedPlugin, keeps_state
from geartrain.metrics import torchmetrics as metric_objects
from geartrain.module.nested import map_tensors, not_plain

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: The version of what is under ``"fit"``.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class EpochStart:
    """How an epoch began, from where its batches can be replayed."""

    #: Batches done in earlier epochs.
    batches_seen: int
    random: dict[str, Any]


def begin_epoch(run: Run) -> EpochStart:
    """Note how the epoch that begins now does so: before its loader is asked for batches, which draws from the generators."""
    return EpochStart(run.batches_seen, random_now(run))


# --- what a checkpoint holds ---------------------------------------------------------------------------------------------


def training_state(run: Run, epochs: int) -> dict[str, Any]:
    """What a ``fit`` needs to go on from here. Every rank calls it.

    It costs ``world_size - 1`` broadcasts of what one rank keeps: about 10 KB of random state and its parts' ``state_dict()``, which
    travels to all ranks although only rank 0 keeps it, because no hook sends to one rank alone. A part that says ``same_on_all_ranks``
    sends nothing.

    Args:
        epochs: epochs done; ``run.epoch`` within an epoch.
    """
    within = epochs == run.epoch and run.batch_idx > 0 and run.epoch_start is not None
    shared, own = _states_of_parts(run)
    random, began = random_now(run), run.epoch_start if within else None
    mine = {
        "parts": own,
        "random": random,
        "began": None if began is None else began.random,
        "metrics": dict(run.reported),
        "reported": {"logged": dict(run.logs.logged), "prog_bar": dict(run.logs.prog_bar), "when": dict(run.logs.when)},
        "logs": run.logs.state_dict() if within else None,
        "metric_objects": map_tensors(metric_objects.states(run.module), _to_cpu) if within else {},
    }
    return {
        "format": FORMAT,
        "step": run.step,
        "epoch": epochs,
        "batch_idx": run.batch_idx if within else 0,
        "validated": within and run.stage == "validate",
        "batches_seen": run.batches_seen if began is None else began.batches_seen,
        "optimizers": [{**_named(optimizer), "parameters": parameter_names(run, optimizer)} for optimizer in run.optimizers],
        "schedulers": [{**_named(schedule.scheduler), "progress": schedule.progress()} for schedule in run.schedulers],
        "parts": shared,
        "seeds": {stage: [order_seeds(loader) for loader in loaders] for stage, loaders in run.loaders.items()},
        "ranks": _from_all_ranks(run, mine),
    }


def _states_of_parts(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each part that keeps state, by name: that which is the same on all ranks, and this rank's own.

    Where ranks' weights differ, what follows from them does too (an average of them, a scaler's skipped steps): then each rank keeps all of
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
    """The parts that keep state, by name; the second of a name gets ``#2``, and so on."""
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
    """Whether all ranks have the same weights: so it is unless the strategy declares that it is not."""
    declared = [getattr(part.plugin, "capabilities", None) for part in parts if part.info.kind == "strategy"]
    return all(one.get("identical_weights", True) for one in declared if isinstance(one, Mapping))


def _portable(state: Any, whose: str) -> Any:
    """A state on the CPU; ``None``, with a warning, where it could not be read again as data alone."""
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
    """An optimizer's or scheduler's state, with its class for a check."""
    state = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else None
    if not isinstance(thing, Optimizer):
        state = _portable(state, type(thing).__name__)
    return {"class": type(thing).__name__, "state": state}


def parameter_names(run: Run, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its order, by which its state knows them; ``""`` for one that is not the module's."""
    named = {parameter: name for name, parameter in run.module.named_parameters()}
    return [named.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]


def _from_all_ranks(run: Run, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's, in order, on rank 0; the others keep none but their own. One rank at a time: so many are in memory at once."""
    ranks = [mine]
    for rank in range(1, run.world.size):
        theirs = run.hooks.broadcast(run=run, obj=mine if run.world.rank == rank else None, src=rank)
        if run.world.rank == 0:
            ranks.append(theirs)
    return ranks


def _loaders(run: Run) -> list[Any]:
    return [loader for stage in ("train", "validate") for loader in run.loaders.get(stage, ())]


def random_now(run: Run) -> dict[str, Any]:
    """Where this rank's random generators stand: the global ones and those of loaders; and whose persistent workers have started."""
    loaders = _loaders(run)
    own = [generator.get_state() for loader in loaders for generator in generators(loader)]
    started = [isinstance(loader, DataLoader) and loader._iterator is not None for loader in loaders]
    return {**random_state(run.device, every=run.plan.layout.devices_per_process > 1), "loaders": own, "workers": started}


def set_random(run: Run, state: dict[str, Any]) -> None:
    """Let all generators go on from what :func:`random_now` gave."""
    loaders = _loaders(run)
    for loader, started in zip(loaders, state.get("workers", ()), strict=False):
        if started and isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is None:
            iter(loader)  # starts them, for which torch draws a seed: now, and not after the generators have been set
    set_random_state(run.device, state)
    own = [generator for loader in loaders for generator in generators(loader)]
    if len(own) != len(state["loaders"]):
        warnings.warn(
            f"the loaders have {len(own)} generators of their own, and had {len(state['loaders'])}: their order does not go on as it was",
            stacklevel=2,
        )
        return
    for generator, numbers in zip(own, state["loaders"], strict=True):
        generator.set_state(numbers)
