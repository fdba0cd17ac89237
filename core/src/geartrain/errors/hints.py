"""Suggestions for names that do not exist, from vocabularies of other frameworks that plugins bring."""

from __future__ import annotations

from importlib_metadata import entry_points


def hint(owner: str, name: str) -> str:
    """Return the suggestion of the installed vocabularies for a name; empty if none of them knows it.

    Call it only while an error or a warning is being made: it imports the vocabularies, which are entry points of the group
    ``geartrain.hints``. Each is a function ``hint(owner, name) -> str``.

    Args:
        owner: the object without this name: ``"geartrain"``, ``"geartrain.callbacks"`` or another module, ``"Module"``, ``"Trainer"``,
            ``"Session"``, the calls ``"Trainer()"`` and ``"Trainer.fit()"``, ``"option"`` of the command line, ``"strategy"`` or
            another kind of plugin; or ``"method"`` of a user's class, for which the answer is the class that would call it.
    """
    for vocabulary in entry_points(group="geartrain.hints"):
        try:
            suggested = str(vocabulary.load()(owner, name) or "")
        except Exception:  # a broken vocabulary must not hide the error that is being raised
            continue
        if suggested:
            return suggested
    return ""


def write_instead(owner: str, name: str) -> str:
    """Return the end of an error: ``". Write: ..."``, or nothing."""
    suggested = hint(owner, name)
    return f". Write: {suggested}" if suggested else ""
