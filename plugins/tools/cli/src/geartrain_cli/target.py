"""Find the Module class that TARGET names, and the DataModule class if its file has one."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from geartrain import DataModule, Module, UsageError
from geartrain.plugin_api import nearest
from geartrain_cli.plugin_files import describe, is_refused_run, load_file, no_runs

Target = tuple[type[Module], type[DataModule] | None]


def find_target(target: str, classes: Mapping[str, str] | None = None) -> Target:
    """Import the classes that TARGET names.

    Args:
        target: ``file.py``, ``file.py:Class`` or ``package.module:Class``.
        classes: names chosen by ``--model`` and ``--data``: of the file, or with their modules.

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
    classes = classes or {}
    if wanted := classes.get("model", wanted):
        models = {wanted: _named(place, module, wanted, Module)}
    if not models:
        name = place.split("/")[-1][:-3].title()
        raise UsageError(
            f"{place} has no subclass of geartrain.Module. Fix: class {name}(geartrain.Module): ..."
        )
    if len(models) > 1:
        names = " or ".join(f"{place}:{name}" for name in models)
        raise UsageError(f"{place} has several Modules. Fix: name one: {names}")
    data = _own_classes(module, DataModule)
    if wanted := classes.get("data", ""):
        data = {wanted: _named(place, module, wanted, DataModule)}
    if len(data) > 1:
        raise UsageError(
            f"{place} has several DataModules ({', '.join(data)}). Fix: --data {next(iter(data))}"
        )
    return next(iter(models.values())), next(iter(data.values()), None)


def choose_classes(target: Target, classes: Mapping[str, str]) -> Target:
    """Return the target of a script with the classes that ``--model`` and ``--data`` name."""
    model, data = target
    if not classes:
        return target
    home = sys.modules[model.__module__]
    if "model" in classes:
        model = _named(home.__name__, home, classes["model"], Module)
    if "data" in classes:
        data = _named(home.__name__, home, classes["data"], DataModule)
    return model, data


def _named(place: str, module: ModuleType, name: str, base: type) -> type:
    """Return the class of a name in the target's module, or with its own module.

    Raises:
        UsageError: there is no such class.
    """
    found = getattr(module, name, None) if "." not in name else import_class(name)
    if not (inspect.isclass(found) and issubclass(found, base)):
        known = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base)]
        raise UsageError(f"{place} has no {base.__name__} {name!r}. {nearest(name, known)}")
    return found


def import_class(path: str) -> type | None:
    """Return the class of an import path, ``None`` if the module has no such name.

    Raises:
        UsageError: the module cannot be imported.
    """
    module, _, name = path.rpartition(".")
    found: type | None = getattr(_import(module), name, None)
    return found


def _import(name: str) -> ModuleType:
    # `python -m` and `python file.py` search the working folder first; a console script does not.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with no_runs(name):
            return importlib.import_module(name)
    except BaseException as error:  # as for a file
        if isinstance(error, KeyboardInterrupt) or is_refused_run(error):
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
