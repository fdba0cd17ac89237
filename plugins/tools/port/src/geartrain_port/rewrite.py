"""Rewrite a file for geartrain: references, imports and calls. The rest stays as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper

from geartrain_port import calls, classes, names
from geartrain_port.arguments import Arguments, comments
from geartrain_port.result import PortResult, Todo
from geartrain_port.survey import Survey, dotted, root

#: Methods of a trainer -> arguments with another name in geartrain.
_METHODS = {
    "fit": {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"},
    "validate": {"val_dataloaders": "dataloaders"},
    "test": {"test_dataloaders": "dataloaders"},
    "predict": {},
}


def rewrite(module: cst.Module) -> PortResult:
    """Port a parsed file."""
    wrapper = MetadataWrapper(module)
    survey = Survey(wrapper)
    changes = _Rewrite(survey)
    text = wrapper.module.visit(changes).code
    return PortResult(
        text, tuple(sorted({*survey.left, *changes.left})), tuple(sorted({*survey.changed}))
    )


class _Rewrite(cst.CSTTransformer):
    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self._survey = survey
        self.left: list[Todo] = []
        #: The package's name in the new file: ``gt``, unless the file uses that name otherwise.
        taken = survey.words | set(survey.modules)
        self._package = "gt" if "gt" not in taken or survey.modules.get("gt") == "" else "geartrain"
        #: Names in the file -> their new names.
        self._renamed = self._choose_names()
        #: Imports that the references need in addition to the file's: (module, name).
        self._more = {
            (module, name)
            for node, path in survey.references.items()
            if isinstance(node, cst.Attribute)
            for module, name in [_target(path)]
            if path.startswith("bagua.")
            or not (module.startswith("geartrain.") or module == "geartrain")
        }
        self._to_add = self._more - survey.brought
        #: The file's names of Lightning's modules with at least one ported reference.
        self._roots = {root(node) for node in survey.references if isinstance(node, cst.Attribute)}
        self._comments: list[cst.Comment] = []
        self._trainers = {"trainer"}
        #: Variables whose value is a LightningCLI.
        self._clis: set[str] = set()
        #: Calls of LightningCLI with run=False -> the statement that then runs fit. gt.cli does
        #: both.
        self._run_later: dict[cst.Call, cst.Expr] = {}
        self._own_steps = not calls.OWN_STEPS.isdisjoint(survey.words)

    def _choose_names(self) -> dict[str, str]:
        """Return new names: ``LightningModule`` becomes ``Module`` if that name is free."""
        new: dict[str, str] = {}
        for node, path in self._survey.references.items():
            if isinstance(node, cst.Name):
                name = _target(path)[1]
                free = name not in self._survey.words and node.value not in self._survey.strings
                if node.value == names.key(path)[1] != name and free:
                    new[node.value] = name
        return new

    # --- references -------------------------------------------------------------------------------

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node in self._survey.references and original_node.value in self._renamed:
            return updated_node.with_changes(value=self._renamed[original_node.value])
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if original_node.attr.value == "global_step" and self._own_steps:
            self._survey.say_changed(original_node, dotted(original_node), calls.COUNTS_BATCHES)
        if dotted(original_node.value) in self._clis:
            return self._of_cli(original_node, updated_node)
        path = self._survey.references.get(original_node)
        if path is None:
            return updated_node
        return cst.parse_expression(self._reference(root(original_node), path))

    def _of_cli(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        """Port an attribute of a LightningCLI: gt.cli returns the trainer."""
        name = original.attr.value
        if name == "trainer":
            return updated.value
        if name == "model":
            return cst.parse_expression(f"{dotted(original.value)}.run.module")
        if name not in ("datamodule", "run"):
            self._survey.say(original, dotted(original), "nothing: gt.cli returns the trainer")
        return updated

    def _reference(self, start: str, path: str) -> str:
        """Return the source of the counterpart of ``path``, whose source starts with ``start``."""
        module, name = _target(path)
        if (module, name) in self._more:
            return name
        base = self._survey.modules.get(start, "")
        if base in names.MODULES and module == f"geartrain.{base}":
            return f"{start}.{name}"
        return f"{self._local(start)}{module.removeprefix('geartrain')}.{name}"

    def _local(self, start: str) -> str:
        """Return the new name of the package for the file's name of it."""
        full = start in ("pytorch_lightning", "lightning", "geartrain")
        return "geartrain" if full else self._package

    def leave_Annotation(
        self, original_node: cst.Annotation, updated_node: cst.Annotation
    ) -> cst.Annotation:
        found = updated_node.annotation
        if not isinstance(found, cst.SimpleString):
            return updated_node
        text = re.sub(r"[A-Za-z_][\w.]*", lambda word: self._word(word[0]), found.value)
        return updated_node.with_changes(annotation=found.with_changes(value=text))

    def _word(self, word: str) -> str:
        start, _, others = word.partition(".")
        base = self._survey.modules.get(start)
        path = f"{base}.{others}".lstrip(".") if base is not None and others else None
        if path is not None and names.target(path) is not None:
            return self._reference(start, path)
        return self._renamed.get(word, word)

    # --- imports ----------------------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> (
        cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine] | cst.RemovalSentinel
    ):
        if not updated_node.body:  # the statement was removed
            self._comments += comments(original_node)
            return cst.RemoveFromParent()
        if not any(_is_import(statement) for statement in updated_node.body):
            return self._with_comments(updated_node)
        new: list[cst.BaseSmallStatement] = []
        for statement in updated_node.body:
            plain = statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            new += (
                self._imports(plain)
                if isinstance(plain, cst.Import | cst.ImportFrom) and _is_import(plain)
                else [plain]
            )
        if len(new) == 1:
            return self._with_comments(updated_node.with_changes(body=new))
        lines = [cst.SimpleStatementLine([statement]) for statement in new]
        lines[0] = self._with_comments(
            lines[0].with_changes(leading_lines=updated_node.leading_lines)
        )
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    def _with_comments(self, line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        """Return the line with the comments of removed code above it."""
        if not self._comments:
            return line
        more = [cst.EmptyLine(comment=comment) for comment in self._comments]
        self._comments = []
        return line.with_changes(leading_lines=[*line.leading_lines, *more])

    def _imports(self, statement: cst.Import | cst.ImportFrom) -> list[cst.BaseSmallStatement]:
        new = (
            self._import_from(statement)
            if isinstance(statement, cst.ImportFrom)
            else self._import(statement)
        )
        more, self._to_add = sorted(self._to_add), set()
        return [*new, *(_line(f"from {module} import {name}") for module, name in more)]

    def _import(self, statement: cst.Import) -> list[cst.BaseSmallStatement]:
        """Port ``import pytorch_lightning as pl``, alone or with other names."""
        new: list[str] = []
        kept: list[cst.ImportAlias] = []
        for alias in statement.names:
            path = names.tail(dotted(alias.name))
            local = alias.evaluated_alias or dotted(alias.name).partition(".")[0]
            if path is None or dotted(alias.name).startswith("geartrain"):
                kept.append(alias)
                continue
            if local in self._survey.needed:
                kept.append(alias)
                if local not in self._roots:
                    continue
            if path in names.MODULES and alias.asname is not None:
                new.append(f"import geartrain.{path} as {local}")
            else:
                package = self._local(local)
                new.append(
                    "import geartrain"
                    if package == "geartrain"
                    else f"import geartrain as {package}"
                )
        lines = [_line(text) for text in dict.fromkeys(new)]
        if kept:
            lines.insert(
                0,
                statement.with_changes(
                    names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
                ),
            )
        return lines

    def _import_from(self, statement: cst.ImportFrom) -> list[cst.BaseSmallStatement]:
        """Port ``from pytorch_lightning import Trainer, LightningModule``."""
        base = names.tail(dotted(statement.module))
        if base is None or isinstance(statement.names, cst.ImportStar):
            return [statement]
        groups: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            module, new = self._alias(base, alias)
            groups.setdefault(dotted(statement.module) if module is None else module, []).append(
                new
            )
        if len(groups) == 1:
            ((module, aliases),) = groups.items()
            if module:
                return [statement.with_changes(module=cst.parse_expression(module), names=aliases)]
        self._comments += comments(statement)
        lines: list[cst.BaseSmallStatement] = []
        for module, aliases in groups.items():
            if not module:
                lines += [line for alias in aliases for line in self._package_itself(alias)]
                continue
            listed = ", ".join(
                f"{a.evaluated_name} as {a.evaluated_alias}" if a.asname else a.evaluated_name
                for a in aliases
            )
            lines.append(_line(f"from {module} import {listed}"))
        return lines

    def _package_itself(self, alias: cst.ImportAlias) -> list[cst.BaseSmallStatement]:
        """Port ``from lightning import pytorch as pl``."""
        local = alias.evaluated_alias or alias.evaluated_name
        lines: list[cst.BaseSmallStatement] = []
        if local in self._survey.needed:
            lines.append(_line(f"from lightning import {alias.evaluated_name} as {local}"))
        if not lines or local in self._roots:
            lines.append(_line(f"import geartrain{' as gt' if self._package == 'gt' else ''}"))
        return lines

    def _alias(self, base: str, alias: cst.ImportAlias) -> tuple[str | None, cst.ImportAlias]:
        """Return the new module and the new alias of an imported name.

        The module is ``None`` if the import stays, and ``""`` if the name is the package itself.
        """
        path, old = f"{base}.{alias.evaluated_name}".lstrip("."), alias.evaluated_name
        if path in ("pytorch", "fabric"):
            return "", alias
        if path in names.MODULES:
            return "geartrain", alias
        found = names.target(path)
        if found is None:
            return None, alias
        module, name = found
        asname = alias.asname
        if asname is None and name != old and old not in self._renamed and self._survey_uses(old):
            asname = cst.AsName(cst.Name(old))
        return module, alias.with_changes(name=cst.Name(name), asname=asname)

    def _survey_uses(self, name: str) -> bool:
        return any(
            isinstance(node, cst.Name) and node.value == name for node in self._survey.references
        )

    # --- calls ------------------------------------------------------------------------------------

    def visit_Assign(self, node: cst.Assign) -> None:
        name = ""
        if isinstance(node.value, cst.Call):
            name = names.key(self._survey.references.get(node.value.func, "?"))[1]
        targets = {dotted(target.target) for target in node.targets}
        if name == "Trainer":
            self._trainers |= targets
        elif name == "LightningCLI":
            self._clis |= targets
            self._trainers |= {f"{target}.trainer" for target in targets}

    def visit_Module(self, node: cst.Module) -> None:
        self._pair(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._pair(node.body)

    def _pair(self, body: Sequence[cst.BaseStatement]) -> None:
        """Find each ``x = LightningCLI(...)`` before ``x.trainer.fit(x.model, x.datamodule)``."""
        for made, fits in pairwise(map(_only, body)):
            if not (
                isinstance(made, cst.Assign)
                and isinstance(made.value, cst.Call)
                and isinstance(fits, cst.Expr)
            ):
                continue
            name = dotted(made.targets[0].target)
            is_cli = (
                names.key(self._survey.references.get(made.value.func, "?"))[1] == "LightningCLI"
            )
            fit = (
                fits.value
                if isinstance(fits.value, cst.Call)
                and dotted(fits.value.func) == f"{name}.trainer.fit"
                else None
            )
            if (
                is_cli
                and fit is not None
                and {dotted(arg.value) for arg in fit.args}
                <= {f"{name}.model", f"{name}.datamodule"}
            ):
                self._run_later[made.value] = fits

    def leave_Expr(
        self, original_node: cst.Expr, updated_node: cst.Expr
    ) -> cst.Expr | cst.RemovalSentinel:
        return cst.RemoveFromParent() if original_node in self._run_later.values() else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        path = self._survey.references.get(original_node.func)
        if path is not None:
            cls = names.key(path)[1]
            arguments = Arguments(updated_node, classes.POSITIONAL.get(cls, ()))
            if cls == "Trainer":
                todo = calls.trainer(arguments, self._survey.words)
            elif cls == "Fabric":
                todo = calls.fabric(arguments)
            elif cls == "LightningCLI":
                todo = calls.cli(arguments, original_node in self._run_later)
            else:
                todo = classes.plain(cls, arguments, self._survey.has_folder)
                if (
                    cls == "ModelCheckpoint"
                    and "every_n_train_steps" in arguments.names
                    and self._own_steps
                ):
                    arguments.changed.append(
                        ("ModelCheckpoint(every_n_train_steps=...)", calls.COUNTS_BATCHES)
                    )
            return self._done(original_node, arguments, todo)
        func = original_node.func
        if not isinstance(func, cst.Attribute):
            return updated_node
        method, of = func.attr.value, dotted(func.value)
        if of in self._trainers and (method in _METHODS or method == "tune"):
            return self._method(original_node, Arguments(updated_node), method)
        if method == "load_from_checkpoint" and of not in self._survey.without_base:
            return self._done(original_node, *calls.loading(updated_node))
        if of == "self" and method in ("log", "log_dict"):
            arguments = Arguments(updated_node)
            todo = [
                (f"self.{method}({name}=...)", names.LOG[name])
                for name in arguments.names
                if name in names.LOG
            ]
            return self._done(original_node, arguments, todo)
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        more = [cst.EmptyLine(comment=comment) for comment in self._comments]
        return updated_node.with_changes(footer=[*updated_node.footer, *more])

    def _method(self, call: cst.Call, arguments: Arguments, method: str) -> cst.Call:
        if method == "tune":
            return self._done(
                call,
                arguments,
                [("trainer.tune()", "geartrain.tuning.Tuner, or the command geartrain tune")],
            )
        for old, new in _METHODS[method].items():
            if old in arguments.names:
                arguments.rename(old, new)
        if arguments.literal("ckpt_path") == "best" and "ModelCheckpoint" not in self._survey.words:
            self._survey.say(
                call,
                f"{method}(ckpt_path='best')",
                "callbacks=[ModelCheckpoint(monitor=..., dirpath=DIR)], which saves the best",
            )
        for name in ("verbose", "weights_only"):
            if name in arguments.names:
                arguments.drop(name)
        return self._done(call, arguments, calls.fit(arguments) if method == "fit" else [])

    def _done(self, call: cst.Call, arguments: Arguments, todo: list[calls.Todos]) -> cst.Call:
        for message, instead in todo:
            self._survey.say(call, message, instead)
        for message, means in arguments.changed:
            self._survey.say_changed(call, message, means)
        self._comments += arguments.comments
        return arguments.call()


def _target(path: str) -> tuple[str, str]:
    found = names.target(path)
    assert found is not None
    return found


def _only(line: cst.BaseStatement) -> cst.BaseSmallStatement | None:
    """Return the statement of a line that has one, otherwise ``None``."""
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        return line.body[0]
    return None


def _is_import(statement: Any) -> bool:
    """True if a statement imports something from Lightning."""
    if isinstance(statement, cst.ImportFrom):
        outside = statement.module is not None and not statement.relative
        module = dotted(statement.module) if outside else ""
        return names.tail(module) is not None and not module.startswith("geartrain")
    return isinstance(statement, cst.Import) and any(
        names.tail(dotted(alias.name)) is not None for alias in statement.names
    )


def _line(text: str) -> Any:
    return cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine).body[0]
