"""``geartrain doctor --pickle TARGET``: find objects that cannot be sent to another process."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from geartrain import DataModule, Module, Trainer, UsageError
from geartrain.plugin_api import DataSource, Registry, Stage
from geartrain_cli.arguments import Request
from geartrain_tools.doctor.findings import Section

try:
    from geartrain_spawn.refusals import Dump, Refusal, plain_dump, refusals
except ImportError:
    raise UsageError(
        "geartrain doctor --pickle needs geartrain-spawn. Fix: pip install geartrain-spawn"
    ) from None

#: Most findings per object.
_MOST = 50
_LOADER = ("dataset", "collate_fn", "worker_init_fn")
_IN_SETUP = (
    "create it in setup(), leave it out in __getstate__, or avoid pickling: --strategy ddp, or "
    "start_method fork"
)
_BY_NAME = (
    "use a function or class that can be imported, or pip install geartrain-spawn, which sends its "
    "code"
)


def pickles(section: Section, request: Request) -> None:
    """Build module, data and loaders as ``geartrain fit`` does; report what does not pickle."""
    dump = _by_value(request.trainer.setup.registry)
    facts = section.facts
    facts |= {
        "target": request.target[0].__name__,
        "pickler": "pickle" if dump is None else "cloudpickle",
        "refused": [],
    }
    model, data = request.make_model()
    for name, thing in (("model", model), ("data", data)):
        for found in islice(
            refusals(name, thing, dump or plain_dump, by_value=dump is not None), _MOST
        ):
            by_name = dump is None and found.is_name
            facts["refused"].append(
                _row(found, "ddp_spawn by forkserver or spawn", needed=not by_name)
            )
            message = f"{found.path}: {found.what} cannot be pickled ({found.why})"
            section.problem(message, _BY_NAME if by_name else _IN_SETUP, must=not by_name)
    owners = [thing for thing in (data, model) if thing is not None]
    _attach(request.trainer, model, data)
    try:
        for name, loader in _loaders(owners, DataSource({}, data), model):
            _look_at_loader(section, name, loader)
    finally:
        for thing in owners:
            thing.teardown("fit")
        _attach(None, model, data)


def _row(found: Refusal, needed_by: str, needed: bool) -> dict[str, Any]:
    return {
        "path": found.path,
        "what": found.what,
        "why": found.why,
        "needed_by": needed_by,
        "needed": needed,
    }


def _by_value(registry: Registry) -> Dump | None:
    """Return ddp_spawn's ``dump``, which pickles for its ranks; ``None`` if it is not installed."""
    with contextlib.suppress(UsageError):  # missing, blocked or broken: other checks report it
        dump: Dump | None = getattr(
            registry.load(registry.find("strategy", "ddp_spawn")), "dump", None
        )
        return dump
    return None


# --- loaders --------------------------------------------------------------------------------------


def _attach(trainer: Trainer | None, model: Module, data: DataModule | None) -> None:
    """Set or remove the trainer of module and data: ``setup`` and loader methods may use it."""
    model._trainer = trainer
    if data is not None:
        data.trainer = trainer
    if trainer is not None:
        trainer.datamodule = data


def _loaders(owners: list[Any], source: DataSource, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield every loader of a fit, with the name of the method that returns it."""
    for owner in owners:
        owner.prepare_data()
    for owner in owners:
        owner.setup("fit")
    for stage in ("train", "validate"):
        loaders = Stage(source.loaders(stage, model)).single_loaders()
        for i, loader in enumerate(loaders):
            yield source.method(stage) + (f"[{i}]" if len(loaders) > 1 else ""), loader


def _look_at_loader(section: Section, name: str, loader: Any) -> None:
    """Check the dataset and functions that workers get by plain pickle, unless they are forked."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else _default_method()
    needed = loader.num_workers > 0 and method != "fork"
    for part in _LOADER:
        for found in islice(refusals(f"{name}.{part}", getattr(loader, part), plain_dump), _MOST):
            section.facts["refused"].append(
                _row(found, "loader workers by forkserver or spawn", needed)
            )
            current = (
                f"num_workers={loader.num_workers}, workers start by {method}"
                if loader.num_workers
                else "num_workers=0"
            )
            section.problem(
                f"{found.path}: {found.what} cannot be pickled ({found.why}), and loader workers "
                f"that are not forked need it: {current}",
                "use a function or class that can be imported, create the object in the worker, or "
                "set multiprocessing_context='fork'",
                must=needed,
            )


def _default_method() -> str:
    """Return the default start method without fixing it, as ``get_start_method()`` would."""
    return (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
