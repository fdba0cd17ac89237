"""Find the Module class that TARGET names, and the DataModule class if its file has one."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

from geartrain import DataModule, Module, UsageError
from geartrain.plugin_api import nearest
from geartrain_cli.plugin_files import describe, load_file

Target = tuple[type[Module], type[DataModule] | None]


def find_target(target: str) -> Target:
    """Import the classes that TARGET names.

    Args:
        target: ``file.py``, ``file.py:Class`` or ``package.module:Class``.

    Raises:
        UsageError: the file, module or class does not exist, or several classes match.
    """
    place, _, wanted = target.partition(":")
    if place.endswith(".py"):
        module = load_file(Path(place).expanduser())
    elif "/" in place or Path(place).is_dir():
        raise UsageError(
            f"TARGET {target!r} is not a Python file. "
            "Fix: file.py, file.py:Class or package.module:Class"
        )
    else:
        module = _import(place)
    models = _own_classes(module, Module)
    if wanted:
        found = getattr(module, wanted, None)
        if not (inspect.isclass(found) and issubclass(found, Module)):
            raise UsageError(f"{place} has no Module {wanted!r}. {nearest(wanted, models)}")
        models = {wanted: found}
    if not models:
        name = place.split("/")[-1][:-3].title()
        raise UsageError(
            f"{place} has no subclass of geartrain.Module. Fix: class {name}(geartrain.Module): ..."
        )
    if len(models) > 1:
        names = " or ".join(f"{place}:{name}" for name in models)
        raise UsageError(f"{place} has several Modules. Fix: name one: {names}")
    data = _own_classes(module, DataModule)
    if len(data) > 1:
        raise UsageError(
            f"{place} has several DataModules ({', '.join(data)}). Fix: keep one in the file"
        )
    return next(iter(models.values())), next(iter(data.values()), None)


def _import(name: str) -> ModuleType:
    # `python -m` and `python file.py` search the working folder first; a console script does not.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except BaseException as error:  # as for a file
        if isinstance(error, KeyboardInterrupt):
            raise
        hint = f" (a file? {name}.py)" if Path(f"{name}.py").is_file() else ""
        reason = describe(error)
        raise UsageError(f"TARGET {name!r} could not be imported: {reason}{hint}") from error


def _own_classes(module: ModuleType, base: type) -> dict[str, type]:
    """Return the subclasses of ``base`` that a module defines, without bases of one another."""
    found = {
        n: c
        for n, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, base) and c.__module__ == module.__name__
    }
    first = {c: n for n, c in reversed(found.items())}  # `Model = Mine` is not a second class
    return {
        n: c
        for n, c in found.items()
        if first[c] == n
        and not any(other is not c and issubclass(other, c) for other in found.values())
    }
