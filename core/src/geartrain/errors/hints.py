"""Suggestions for unknown names, from plugins' vocabularies of other frameworks."""

from __future__ import annotations

from geartrain.errors.distributions import entry_points


def hint(owner: str, name: str) -> str:
    """Return the suggestion of the installed vocabularies for a name; empty if none knows it.

    Call it only for an error or a warning: it imports the vocabularies, which are entry points of
    the group ``geartrain.hints``. Each is a function ``hint(owner, name) -> str``.

    Args:
        owner: the object without this name: a module (``"geartrain"``, ``"geartrain.callbacks"``),
            a class (``"Module"``, ``"Trainer"``, ``"Session"``), a call (``"Trainer()"``,
            ``"Trainer.fit()"``), ``"option"`` of the command line, or a kind of plugin
            (``"strategy"``); ``"method of Module"`` or ``"method of DataModule"``, which geartrain
            never calls; ``"argument of training_step"``, of which the suggestion is a whole fix; or
            ``"method"`` of a user's class, for which it is the class that would call it.
        name: the unknown name.
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
