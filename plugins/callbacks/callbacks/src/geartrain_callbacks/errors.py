"""Errors that end a run: notes that explain them, and tracebacks of the user's lines alone."""

from __future__ import annotations

import inspect
import os
from types import FrameType, TracebackType
from typing import Any

from geartrain import GeartrainError, Module
from geartrain.plugin_api import Hooks, is_of_user, write_instead

#: The environment variable that keeps all lines.
_WHOLE = "GEARTRAIN_TRACEBACK"
#: (module that raised, words of the error) -> the fix.
_FIXES = {
    ("torch.optim", "empty parameter list"): (
        "make layers attributes of the module, and a list of them an nn.ModuleList"
    ),
    ("torch.optim", "not supported between instances"): "give the optimizer numbers, as lr=0.1",
    ("torch", "backward through the graph a second time"): (
        "return the loss and leave backward() out; or automatic_optimization = False in __init__"
    ),
}


def explain(error: BaseException, hooks: Hooks | None) -> None:
    """Shorten the traceback of an error that ends a run, and add notes if ``hooks`` are given.

    A note names the plugin whose hookimpl raised it, if neither core nor the user's module did;
    another one has the fix of a frequent mistake.
    """
    for note in () if hooks is None else filter(None, (_plugin(error, hooks), _fix(error))):
        error.add_note(note)
    if isinstance(error, Exception):
        _shorten(error)


# --- notes ----------------------------------------------------------------------------------------


def _plugin(error: BaseException, hooks: Hooks) -> str:
    """Return the note that names the plugin whose hookimpl raised an error, or nothing."""
    impls: dict[Any, list[tuple[Any, str]]] = {}
    for hook, impl, info in hooks.implementations():
        if impl.trylast:  # the user's method, which the traceback shows
            continue
        label = f"{impl.plugin_name}, which was registered by hand" if info is None else info.label
        label = "" if info is not None and info.is_core else label
        code = getattr(inspect.unwrap(impl.function), "__code__", None)
        impls.setdefault(code, []).append((impl.plugin, label and f"{hook!r} of {label}"))
    # The innermost frame of a hookimpl raised the error; those around it only passed it on.
    for frame in reversed(_frames(error)):
        if frame.f_code not in impls:
            if isinstance(frame.f_locals.get("self"), Module):
                return ""
            continue
        # Two plugins may have inherited one function: then the frame has the plugin's object.
        found, objects = impls[frame.f_code], frame.f_locals.values()
        bound = [pair for pair in found if any(pair[0] is value for value in objects)]
        raised = (bound or found)[0][1]
        return raised and f"raised in hook {raised}"
    return ""


def _fix(error: BaseException) -> str:
    """Return the note with the fix of a frequent mistake, or nothing."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Module):
        answer = write_instead("Module", str(error.name))
        if answer:
            return f"geartrain.Module has no {error.name!r}{answer}"
    frames = _frames(error)
    raised_by = str(frames[-1].f_globals.get("__name__")) if frames else ""
    for (module, words), remedy in _FIXES.items():
        if words in str(error) and f"{raised_by}.".startswith(f"{module}."):
            return f"Fix: {remedy}"
    return ""


# --- tracebacks -----------------------------------------------------------------------------------


def _shorten(error: BaseException) -> None:
    """Remove the lines of geartrain, pluggy, torch and Python, unless the error is geartrain's.

    An error that geartrain raises on purpose explains itself: a cause in which the user has no line
    is not shown; it is still the error's ``__context__``.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and not os.environ.get(_WHOLE):
        seen.add(id(current))
        cause = current.__cause__
        if cause is None and not current.__suppress_context__:
            cause = current.__context__
        of_geartrain = isinstance(current, GeartrainError) and not _travelled(current)
        _shorten_one(current)
        if of_geartrain and cause is not None and not any(map(is_of_user, _frames(cause))):
            current.__cause__, current.__context__ = None, cause
        current = cause


def _shorten_one(error: BaseException) -> None:
    entries = _entries(error.__traceback__)
    of_user = [i for i, entry in enumerate(entries) if is_of_user(entry.tb_frame)]
    kept = [entries[i] for i in of_user]
    if not (isinstance(error, GeartrainError) or _travelled(error)):
        if not of_user:  # of geartrain: all lines are needed
            return
        after = entries[of_user[-1] + 1 :]
        if after and str(after[-1].tb_frame.f_globals.get("__name__")).startswith("geartrain"):
            kept += after
    shortened: TracebackType | None = None
    for entry in reversed(kept):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shortened


def _travelled(error: BaseException) -> bool:
    """True if the error was raised in another process: its cause is the text of the traceback."""
    return type(error.__cause__).__module__.startswith("geartrain_")


def _entries(entry: TracebackType | None) -> list[TracebackType]:
    entries = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _frames(error: BaseException) -> list[FrameType]:
    return [entry.tb_frame for entry in _entries(error.__traceback__)]
