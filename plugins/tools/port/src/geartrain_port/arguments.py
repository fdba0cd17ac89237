"""Change the arguments of one call by name. Other arguments keep their formatting and comments."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst


class Arguments:
    """The arguments of a call, which methods change.

    Args:
        call: the call, which itself is not changed.
        positional: the names of positional arguments, in order.
    """

    def __init__(self, call: cst.Call, positional: Sequence[str] = ()) -> None:
        self._call = call
        self._names = [
            _name(arg, positional[place] if place < len(positional) else "")
            for place, arg in enumerate(call.args)
        ]
        self._args: list[cst.Arg] = list(call.args)
        #: Comments of dropped arguments, to keep elsewhere.
        self.comments: list[cst.Comment] = []
        #: Changes of meaning: the argument, and its new meaning.
        self.changed: list[tuple[str, str]] = []

    @property
    def names(self) -> list[str]:
        """The arguments' names: ``""`` is positional and unknown, ``"*"`` and ``"**"`` unpacked."""
        return self._names

    def source(self, name: str) -> str | None:
        """Return an argument's value as source, or ``None`` if the call does not have it."""
        return code(self._args[self._names.index(name)].value) if name in self._names else None

    def literal(self, name: str) -> Any:
        """Return an argument's value if it is a literal, otherwise ``...``."""
        try:
            return ast.literal_eval(self.source(name) or "...")
        except (ValueError, SyntaxError):
            return ...

    def drop(self, name: str) -> None:
        """Remove an argument."""
        place = self._names.index(name)
        arg = self._args.pop(place)
        self._names.pop(place)
        self.comments += comments(arg)
        if self._args and place == len(self._args):  # the new last argument ends like the old one
            last = self._args[-1]
            comma = _like(arg.comma, last.comma)
            self.comments += comments(last.comma) if not comments(comma) else []
            self._args[-1] = last.with_changes(
                comma=comma, whitespace_after_arg=_bare(arg.whitespace_after_arg)
            )

    def rename(self, old: str, new: str, value: str | None = None) -> None:
        """Rename an argument, and replace its value if one is given."""
        place = self._names.index(old)
        arg = self._args[place]
        changes: dict[str, Any] = {
            "keyword": cst.Name(new),
            "equal": arg.equal if arg.keyword else _EQUAL,
        }
        if value is not None:
            changes["value"] = cst.parse_expression(value)
        self._args[place], self._names[place] = arg.with_changes(**changes), new

    def put(self, name: str, value: str, after: str | None = None) -> None:
        """Set an argument; add a new one after ``after``, by default last but before ``**``."""
        if name in self._names:
            self.rename(name, name, value)
            return
        end = next((n for n, known in enumerate(self._names) if known == "**"), len(self._names))
        place = self._names.index(after) + 1 if after in self._names else end
        new = cst.Arg(cst.parse_expression(value), cst.Name(name), equal=_EQUAL)
        if place == len(self._args) and self._args:
            last = self._args[-1]
            many = len(self._args) > 1 and isinstance(self._args[-2].comma, cst.Comma)
            new = new.with_changes(
                comma=_like(last.comma, None), whitespace_after_arg=last.whitespace_after_arg
            )
            plain = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            between = self._args[-2].comma if many else plain
            comma = _like(between, last.comma)
            self.comments += comments(last.comma) if not comments(comma) else []
            self._args[-1] = last.with_changes(
                comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")
            )
        elif self._args:
            new = new.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        self._args.insert(place, new)
        self._names.insert(place, name)

    def extend(self, name: str, item: str) -> None:
        """Add an item to a list argument, or make the list."""
        before = self.source(name)
        listed = (
            f"[{item}]"
            if before is None
            else f"{before[:-1].rstrip().rstrip(',')}, {item}]"
            if before.endswith("]")
            else None
        )
        listed = f"[{item}]" if listed == f"[, {item}]" else listed
        self.put(name, listed if listed is not None else f"[*{before}, {item}]")

    def call(self) -> cst.Call:
        """Return the call with the changed arguments."""
        return self._call.with_changes(args=self._args)


_NONE = cst.SimpleWhitespace("")
_EQUAL = cst.AssignEqual(whitespace_before=_NONE, whitespace_after=_NONE)


def code(node: cst.CSTNode) -> str:
    """Return a node's source."""
    return cst.Module([]).code_for_node(node)


def comments(node: cst.CSTNode | cst.MaybeSentinel) -> list[cst.Comment]:
    """Return every comment in a node, in order."""
    if isinstance(node, cst.MaybeSentinel):
        return []
    found: list[cst.Comment] = [node] if isinstance(node, cst.Comment) else []
    for child in node.children:
        found += comments(child)
    return found


def _bare(space: Any, said: Any = None) -> Any:
    """Return whitespace without its comments, with the first line of ``said`` if it has one."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    line = (
        said.first_line
        if isinstance(said, cst.ParenthesizedWhitespace)
        else space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    )
    return space.with_changes(first_line=line, empty_lines=[])


def _like(comma: Any, old: Any) -> Any:
    """Return a comma with the line break of ``comma`` and the comment of ``old``."""
    if not isinstance(comma, cst.Comma):
        return comma
    whitespace = old.whitespace_after if isinstance(old, cst.Comma) else None
    return cst.Comma(whitespace_after=_bare(comma.whitespace_after, whitespace))


def _name(arg: cst.Arg, positional: str) -> str:
    return arg.star or (arg.keyword.value if arg.keyword else positional)
