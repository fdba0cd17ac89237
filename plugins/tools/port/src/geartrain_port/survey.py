"""Find a file's references to PyTorch Lightning, with and without a counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from geartrain.callbacks import NOT_CALLED as NOT_CALLED_OF_CALLBACK
from geartrain.plugin_api import OVERRIDES
from geartrain_port import names
from geartrain_port.result import Todo

#: Base class in geartrain -> methods that geartrain never calls.
_METHODS = {
    "Module": names.NOT_CALLED,
    "DataModule": names.NOT_CALLED_OF_DATA,
    "Callback": NOT_CALLED_OF_CALLBACK,
}


class Survey(cst.CSTVisitor):
    """Reads a file once. Its attributes then have everything to change.

    Args:
        wrapper: the file, with metadata.
    """

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        #: Each outermost reference with a counterpart -> its path after Lightning's package.
        self.references: dict[cst.CSTNode, str] = {}
        #: Names of Lightning's package or its modules in the file -> the module's path.
        self.modules: dict[str, str] = {}
        #: The names of these that code without a counterpart still needs.
        self.needed: set[str] = set()
        #: Every name in the file.
        self.words: set[str] = set()
        #: Strings, which may be names, as in ``__all__``.
        self.strings: set[str] = set()
        self.left: list[Todo] = []
        self.changed: list[Todo] = []
        #: True if a Trainer of the file has a folder for its files.
        self.has_folder = False
        #: Names that the file imports, as (module, name) in geartrain.
        self.brought: set[tuple[str, str]] = set()
        #: Classes of the file without a base class, which are none of Lightning's.
        self.without_base: set[str | None] = set()
        self._class: list[str] = []
        self._positions: Any = wrapper.resolve(PositionProvider)
        self._origins: Any = wrapper.resolve(QualifiedNameProvider)
        wrapper.module.visit(self)

    def say(self, node: cst.CSTNode, what: str, instead: str) -> None:
        """Add something that is left to do."""
        self.left.append(Todo(self._positions[node].start.line, what, instead))

    def say_changed(self, node: cst.CSTNode, what: str, means: str) -> None:
        """Add something with a different meaning in geartrain."""
        self.changed.append(Todo(self._positions[node].start.line, what, means))

    def visit_Call(self, node: cst.Call) -> None:
        if names.key(self.path(node.func) or "?")[1] == "Trainer":
            given = {
                arg.keyword.value
                for arg in node.args
                if arg.keyword is not None and dotted(arg.value) != "None"
            }
            self.has_folder |= bool(given & {"default_root_dir", "weights_save_path", "output"})

    # --- names ------------------------------------------------------------------------------------

    def path(self, node: cst.CSTNode) -> str | None:
        """Return the path of a name or an attribute after Lightning's package, or ``None``."""
        for origin in self._origin(node):
            if (path := names.tail(origin)) is not None:
                return path
        return None

    def _origin(self, node: cst.CSTNode) -> list[str]:
        found = self._origins.get(node, ())
        return [
            name.name
            for name in (found() if callable(found) else found)
            if name.source is QualifiedNameSource.IMPORT
        ]

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            path = names.tail(_dotted(alias.name))
            if path is not None and path.startswith("bagua"):
                # The import itself changes torch's modules. The user removes it with the calls.
                self.needed.add(alias.evaluated_alias or "bagua")
                self.say(node, f"import {_dotted(alias.name)}", names.instead(path))
            if path is not None and alias.asname is not None:
                self.modules[cst.ensure_type(alias.asname.name, cst.Name).value] = path
            elif path is not None:
                self.modules[_dotted(alias.name).partition(".")[0]] = ""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        outside = node.module is not None and not node.relative
        base = names.tail(_dotted(node.module)) if outside else None
        if base is None:
            if not isinstance(node.names, cst.ImportStar):
                self.words |= {
                    alias.evaluated_alias or alias.evaluated_name for alias in node.names
                }
            return False
        if isinstance(node.names, cst.ImportStar):
            self.say(
                node,
                f"from {_dotted(node.module)} import *",
                "the names that the file needs, one by one",
            )
            return False
        for alias in node.names:
            path = f"{base}.{alias.evaluated_name}".lstrip(".")
            if path in ("pytorch", "fabric", *names.MODULES):
                self.modules[alias.evaluated_alias or alias.evaluated_name] = (
                    path if path in names.MODULES else ""
                )
            elif (found := names.target(path)) is not None:
                self.brought |= {found} if alias.asname is None else set()
            elif not _dotted(node.module).startswith("geartrain"):
                self.say(
                    node, f"{_dotted(node.module)}.{alias.evaluated_name}", names.instead(path)
                )
        return False

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self.strings.add(str(node.evaluated_value))

    def visit_Name(self, node: cst.Name) -> None:
        self.words.add(node.value)
        path = self.path(node)
        if path is not None and names.target(path) is not None:
            self.references[node] = path
        elif node.value in self.modules and path is not None:
            self.needed.add(node.value)
            self.say(node, node.value, names.instead(path))

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self._member(node)
        path = self.path(node)
        if path is None:
            self.words.add(node.attr.value)
            node.value.visit(self)  # the attribute's name is not a variable
            return False
        if names.target(path) is not None and not isinstance(
            names.target(self.path(node.value) or ""), tuple
        ):
            self.references[node] = path
            return False
        if any(names.target(path[:place]) for place, letter in enumerate(path) if letter == "."):
            node.value.visit(self)
            return False
        root = _root(node)
        if root in self.modules and not self._ours(node):
            self.needed.add(root)
            self.say(node, _dotted(node), names.instead(path))
        return False

    def _ours(self, node: cst.CSTNode) -> bool:
        return any(origin.startswith("geartrain") for origin in self._origin(node))

    # --- classes ----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        bases = [names.target(self.path(base.value) or "") for base in node.bases]
        self.without_base |= set() if node.bases else {node.name.value}
        if ("geartrain", "cli") in bases:
            self.say(
                node,
                f"class {node.name.value}(LightningCLI)",
                "gt.cli(MyModule, MyDataModule): arguments of their __init__ are options",
            )
        kind = next((found[1] for found in bases if found is not None and found[1] in _METHODS), "")
        self._class.append(kind)
        for statement in node.body.body if kind else ():
            if not isinstance(statement, cst.FunctionDef):
                continue
            name = statement.name.value
            if name in _METHODS[kind]:
                self.say(
                    statement,
                    f"{node.name.value}.{name}, which would never be called",
                    _METHODS[kind][name],
                )
            is_step = kind == "Module" and name == "training_step"
            if is_step and "optimizer_idx" in _parameters(statement):
                self.say(
                    statement,
                    f"{node.name.value}.training_step(optimizer_idx)",
                    "manual optimisation: self.optimizers()",
                )
            elif (
                kind == "Module" and name in OVERRIDES and "optimizer_idx" in _parameters(statement)
            ):
                message = f"{node.name.value}.{name}(optimizer_idx)"
                self.say(statement, message, "the method without optimizer_idx, as in Lightning 2")

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._class.pop()

    def _member(self, node: cst.Attribute) -> None:
        name = node.attr.value
        owner = _dotted(node.value)
        if name == "with_bagua":  # Bagua adds it to every nn.Module
            self.say(
                node,
                f"{owner}.{name}",
                "gt.Module's configure_optimizers, and a Trainer with strategy='bagua'",
            )
        elif name in names.OF_CLASSES:
            self.say(node, f"{owner}.{name}", names.OF_CLASSES[name])
        elif owner.endswith("trainer") and name in names.OF_TRAINER:
            self.say(node, f"{owner}.{name}", names.OF_TRAINER[name])
        elif owner.endswith("fabric") and name in names.OF_FABRIC and self.path(node) is None:
            self.say(node, f"{owner}.{name}", names.OF_FABRIC[name])
        elif self._class and name in names.OF_OPTIMIZERS:
            self.say(node, f"{owner}.{name}", names.OF_OPTIMIZERS[name])
        elif names.MEMBERS.get(name) and (
            owner == "pl_module" or (owner == "self" and self._class[-1:] == ["Module"])
        ):
            self.say(node, f"{owner}.{name}", names.MEMBERS[name])


def _parameters(function: cst.FunctionDef) -> Sequence[str]:
    return [parameter.name.value for parameter in function.params.params]


def _dotted(node: cst.BaseExpression | None) -> str:
    """Return ``a.b.c`` as written, with ``...`` for a part that is not a name."""
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else "..."


def _root(node: cst.BaseExpression) -> str:
    return _dotted(node).partition(".")[0]


dotted, root = _dotted, _root
