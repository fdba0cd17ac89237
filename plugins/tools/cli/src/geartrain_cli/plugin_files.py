"""One-file plugins: ``my_hooks.py`` and ``my_hooks.py:Class``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from geartrain import Trainer, UsageError
from geartrain.plugin_api import Hooks, nearest


def load_file(path: Path, name: str | None = None) -> ModuleType:
    """Import a Python file as a module, with its folder on ``sys.path`` as in ``python FILE``.

    Args:
        name: the module's; default: the file's stem.

    Raises:
        UsageError: the file does not exist, or raises.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {path}. {nearest(path.name, beside)}")
    name = name or path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file and Path(str(file)).resolve() == path.resolve():
            return loaded
        message = (
            f"{path} would be imported as {name!r}, and a module of that name is loaded already"
        )
        raise UsageError(f"{message}. Fix: rename the file.")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with no_runs(str(path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt) or is_refused_run(error):
            raise
        raise UsageError(f"{path} could not be imported: {describe(error)}") from error
    return module


_RUNS = "starts a run when it is imported"


@contextmanager
def no_runs(name: str) -> Iterator[None]:
    """Refuse the runs of Trainers inside the block, in which the module ``name`` is imported."""
    before = Trainer.refusal
    hint = 'put it under if __name__ == "__main__":'
    Trainer.refusal = f"{name} {_RUNS}. Fix: {hint}, so that a command finds the classes alone"
    try:
        yield
    finally:
        Trainer.refusal = before


def is_refused_run(error: BaseException) -> bool:
    return isinstance(error, UsageError) and _RUNS in str(error)


def describe(error: BaseException) -> str:
    """Return an error and its causes: ``RuntimeError: no data, because of KeyError: 'x'``."""
    text, cause = f"{type(error).__name__}: {error}", error.__cause__
    return f"{text}, because of {describe(cause)}" if cause is not None else text


def file_plugin(spec: str) -> tuple[str, Any] | None:
    """Return the plugin in a file: its one plugin class, or the module if it has functions.

    A plugin class has hookimpls, or ``as_plugin``, as a callback has.

    Args:
        spec: ``file.py`` or ``file.py:Class``.

    Returns:
        The name for its options (the file's stem, or the class), and the class or module; ``None``
        if ``spec`` names no file.

    Raises:
        UsageError: the file cannot be imported, or has no plugin or several.
    """
    file, _, wanted = spec.partition(":")
    if not file.endswith(".py"):
        return None
    module = load_file(Path(file).expanduser())
    classes = {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and (Hooks.has_hookimpls(cls) or hasattr(cls, "as_plugin"))
    }
    if wanted:
        if wanted not in classes:
            raise UsageError(f"{file} has no plugin class {wanted!r}. {nearest(wanted, classes)}")
        return wanted, classes[wanted]
    if Hooks.has_hookimpls(module):
        if classes:
            message = f"{file} marks functions and classes with @hookimpl"
            raise UsageError(f"{message}. Fix: name one: {file}:{next(iter(classes))}")
        return module.__name__, module
    if not classes:
        hint = "from geartrain import hookimpl, and mark a function or method"
        raise UsageError(f"{file} has nothing marked with @hookimpl. Fix: {hint}")
    if len(classes) > 1:
        names = " or ".join(f"{file}:{name}" for name in classes)
        raise UsageError(f"{file} has several plugins. Fix: name one: {names}")
    return module.__name__, next(iter(classes.values()))
