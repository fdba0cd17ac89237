"""Write the reference pages from docstrings, so that code and pages agree.

python docs/make_reference.py          rewrite docs/hooks.md and docs/plugin-api.md, and the
                                       generated parts of docs/options.md and
                                       docs/how-a-run-flows.md
python docs/make_reference.py --check  exit with 1, and name the pages, if that would change a page
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from geartrain import DataModule, Module, Run, Trainer, hookspecs, plugin_api
from geartrain.hooks.spelling import OVERRIDES

DOCS = Path(__file__).parent

#: Trainer's arguments that have another form on the command line -> that form.
SPELT = {
    "plugins": "--plugin NAME_OR_FILE",
    "callbacks": "--plugin NAME_OR_FILE",
    "block": "--block NAME",
    "accelerator_options": "--accelerator.OPTION",
    "strategy_options": "--strategy.OPTION",
    "plugin_options": "--NAME.OPTION",
    "assume": "--assume NAME=COUNT",
}

#: Sections of the table of the module's hooks: heading -> prefixes; the first match counts.
MODULE_SECTIONS = {
    "The model": (
        *("configure_optimizers", "configure_callbacks", "prepare_", "setup", "teardown"),
    ),
    "Batches": ("transfer_", "on_before_batch_transfer", "on_after_batch_transfer"),
    "Training": ("on_fit", "on_train", "on_before", "on_after", *sorted(OVERRIDES)),
    "Evaluation": ("on_sanity", "on_validation", "on_test", "on_predict"),
    "Checkpoints": ("on_save", "on_load"),
}

HOOKS_INTRO = """\
# The hooks

<!-- docs/make_reference.py writes this page. Edit core/src/geartrain/hookspecs.py instead. -->

This page lists all hooks, with their arguments and results. [How a run flows](how-a-run-flows.md)
shows their order, and [Write a plugin](write-a-plugin.md) how to use them.

- A **single** hook has exactly one owner: the strategy if it implements the hook, else the
  accelerator, else core's default. Plugins may wrap the owner.
- Of an **every** hook, all implementations are called: the plugins first, the last given plugin
  before the others, then the strategy, the accelerator and core.

Each `run` is the `geartrain.Run`: plan, module, device, world, counters, metrics.
"""


#: Sections of docs/plugin-api.md: heading -> names of geartrain.plugin_api.
API_SECTIONS = {
    "Plugins and plans": (
        *("Registry", "InstalledPlugin", "PluginInfo", "LoadedPlugin", "Hooks", "TrainerBase"),
        "KNOWN",
    ),
    "Messages and options": (
        *("nearest", "write_instead", "warn", "is_of_user", "user_path", "check_attributes"),
        "check_module",
    ),
    "Files": ("replacing", "AppendedFile", "remove_abandoned", "read_checkpoint"),
    "Loaders and batches": (
        *("DataSource", "Stage", "with_samplers", "BatchSizer", "MappedBatches"),
        *("close_batches", "length", "drawing_from"),
    ),
    "The module and its optimizers": (
        *("StepForwarder", "overridden", "OVERRIDES", "match_names", "parameters_of"),
        *("load_optimizer", "step_optimizer", "plain_step", "put_off_compiler"),
    ),
    "Nested values": ("map_tensors", "map_nested", "move", "not_plain"),
    "Metrics and loggers": (
        *("LocalMetric", "MetricOptions", "reductions", "libraries", "experiment"),
    ),
    "Ranks and processes": (
        *("RankCoordinator", "ClusterEnvironment", "detect", "START_DIRECTORY", "raise_on_signals"),
    ),
}

API_INTRO = """\
# The interface for plugins

<!-- docs/make_reference.py writes this page. Edit the docstrings in core/src/geartrain instead. -->

A plugin imports core only through `geartrain` and `geartrain.plugin_api`. This page lists the names
of `geartrain.plugin_api`, and [`Run`](#run), which every hook gets. Every other name of core is
internal, and may change without notice. [Write a plugin](write-a-plugin.md) shows how to begin,
[the hooks](hooks.md) when a plugin is called.
"""


# --- docstrings -----------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """Convert a docstring to Markdown: ``x`` and :class:`geartrain.x` -> `x`, lines joined."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most 100 columns."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring."""
    return markdown((inspect.getdoc(thing) or "").partition("\n\n")[0])


def fields(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first ``Name: ...`` field, and the fields."""
    about, found, name = [], {}, ""
    for line in inspect.cleandoc(docstring).splitlines():
        match = re.match(r"([A-Z][a-z]+): ?(.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and (line.startswith(" ") or not line):
            found[name] += "\n" + line
        else:
            about.append(line)
    return markdown("\n".join(about)), {key: markdown(text) for key, text in found.items()}


def arguments(thing: Any) -> dict[str, str]:
    """Return the entries of a docstring's ``Args:`` section by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(thing) or "", re.S | re.M)
    found: dict[str, str] = {}
    for line in inspect.cleandoc("\n" + section[1]).splitlines() if section else []:
        if not line.startswith(" ") and (match := re.match(r"(\w+): (.*)", line)):
            found[match[1]] = match[2]
        elif found:
            found[next(reversed(found))] += "\n" + line
    return {name: markdown(text) for name, text in found.items()}


def signature(name: str, function: Callable[..., Any]) -> str:
    """Return a hook's signature; the type of ``run`` is always Run."""
    found = inspect.signature(function)
    shown = [
        p.name if p.name == "run" else f"{p.name}: {p.annotation}"
        for p in found.parameters.values()
    ]
    return f"{name}({', '.join(shown)}) -> {found.return_annotation}"


def call(name: str, function: Callable[..., Any]) -> str:
    """Return a signature without types, as users write it."""
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.name != "self" and p.kind is not p.VAR_KEYWORD
    ]
    written = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    return f"`{name}({', '.join(written)})`"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


# --- hooks.md -------------------------------------------------------------------------------------


def hooks() -> dict[str, dict[str, Any]]:
    """Return section of hookspecs.py -> hook's name -> its function, in the source's order."""
    sections: dict[str, dict[str, Any]] = {}
    source = inspect.getsource(hookspecs)
    for match in re.finditer(
        r"^# --- (?P<title>.+?) -+$|^@(?:single|every)\ndef (?P<hook>\w+)\(", source, re.M
    ):
        if match["title"]:
            sections[match["title"]] = {}
        else:
            sections[next(reversed(sections))][match["hook"]] = getattr(hookspecs, match["hook"])
    return sections


def hooks_page() -> str:
    parts = [HOOKS_INTRO]
    for title, members in hooks().items():
        heading = title[0].upper() + title[1:]
        links = ", ".join(f"[`{name}`](#{name})" for name in members)
        parts.append(wrapped(f"- [{heading}](#{anchor(heading)}): {links}", "  "))
    for title, members in hooks().items():
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n")
        parts += [hook_section(name, function) for name, function in members.items()]
    return "\n".join(parts).rstrip() + "\n"


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def hook_section(name: str, function: Any) -> str:
    about, found = fields(function.__doc__)
    kind = "single" if function.geartrain_spec["firstresult"] else "every"
    lines = [f"### {name}\n", f"`{signature(name, function)}` · {kind}\n", f"{wrapped(about)}\n"]
    lines += [wrapped(f"- **{key}:** {text}", "  ") for key, text in found.items()]
    return "\n".join(lines).rstrip() + "\n"


# --- plugin-api.md --------------------------------------------------------------------------------


def api_page() -> str:
    """Return docs/plugin-api.md.

    Raises:
        ValueError: ``API_SECTIONS`` has other names than ``geartrain.plugin_api``.
    """
    named = [name for names in API_SECTIONS.values() for name in names]
    if sorted(named) != sorted(plugin_api.__all__):
        other = ", ".join(sorted(set(named) ^ set(plugin_api.__all__)))
        raise ValueError(f"API_SECTIONS of docs/make_reference.py differs in {other}")
    parts = [API_INTRO, "- [The run](#the-run): [`Run`](#run)"]
    for title, names in API_SECTIONS.items():
        links = ", ".join(f"[`{name}`](#{anchor(name)})" for name in names)
        parts.append(wrapped(f"- [{title}](#{anchor(title)}): {links}", "  "))
    parts += ["\n## The run\n", api_section("Run", Run)]
    for title, names in API_SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [api_section(name, getattr(plugin_api, name)) for name in names]
    return "\n".join(parts).rstrip() + "\n"


def api_section(name: str, thing: Any) -> str:
    """Return the section of one name: its call, its docstring and, of a class, its members."""
    is_object = not (callable(thing) or inspect.ismodule(thing))
    about, found = (constant_comment(name), {}) if is_object else fields(thing.__doc__ or "")
    lines = [f"### {name}\n"]
    if callable(thing) and thing is not Run:
        lines.append(f"{api_call(name, thing)}\n")
    lines += [f"{wrapped(about)}\n"]
    lines += [wrapped(f"- `{key}`: {text}", "  ") for key, text in arguments(thing).items()]
    lines += [wrapped(f"- **{key}:** {text}", "  ") for key, text in found.items() if key != "Args"]
    cls = thing if inspect.isclass(thing) else type(thing)
    if cls.__module__.startswith("geartrain") and not inspect.isroutine(thing):
        rows = list(members(cls))
        lines += [""] * (lines[-1][:2] == "- ") + [table(("member", "meaning"), rows)] * bool(rows)
    return "\n".join(lines).rstrip() + "\n"


def api_call(name: str, function: Callable[..., Any]) -> str:
    """Return a signature without types; a default that is no plain value is ``...``."""
    shown = []
    for p in inspect.signature(function).parameters.values():
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        is_plain = p.default is None or isinstance(p.default, bool | int | float | str | tuple)
        default = "" if p.default is p.empty else f"={p.default!r}" if is_plain else "=..."
        if p.name not in ("self", "cls"):
            shown.append(f"{stars}{p.name}{default}")
    return f"`{name}({', '.join(shown)})`"


def constant_comment(name: str) -> str:
    """Return the comment ``#:`` above an object of ``geartrain.plugin_api``; else its docstring."""
    tree = ast.parse(inspect.getsource(plugin_api))
    home = next(
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(found.name == name for found in node.names)
    )
    comments = dict(commented(inspect.getsource(sys.modules[str(home)]), indents=("",)))
    cls = type(getattr(plugin_api, name))
    return f"{comments[name]} {sentence(cls) if cls.__module__.startswith('geartrain') else ''}"


def commented(source: str, indents: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with a comment ``#:`` above it, and the comment."""
    for indent in indents:
        places = rf"((?:^{indent}#: .*\n)+){indent}(?:self\.)?(\w+)\b(?=[:,]? ?[\w=])"
        for match in re.finditer(places, source, re.M):
            yield match[2], markdown(re.sub(r"^ *#: ", "", match[1], flags=re.M))


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield a class's public attributes, properties and methods, with their meaning."""
    for name, comment in commented(inspect.getsource(cls), (" " * 4, " " * 8)):
        if not name.startswith("_") and not callable(getattr(cls, name, None)):
            yield f"`{name}`", comment
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.getdoc(function):
            continue
        if isinstance(member, property):
            yield f"`{name}`", sentence(member)
        elif inspect.isfunction(function) and not hasattr(function, "geartrain_spec"):
            yield api_call(name, function), sentence(function)


# --- options.md -----------------------------------------------------------------------------------


def trainer_table() -> str:
    texts = arguments(Trainer)
    rows = []
    for parameter in inspect.signature(Trainer).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            option = SPELT.get(parameter.name, f"--{parameter.name.replace('_', '-')}")
            rows.append(
                (
                    f"`{parameter.name}`",
                    f"`{option}`",
                    f"`{parameter.default!r}`",
                    texts[parameter.name],
                )
            )
    return table(("argument", "option", "default", "meaning"), rows)


def trainer_methods() -> str:
    methods = {
        name: getattr(Trainer, name) for name in ("fit", "validate", "test", "predict", "check")
    }
    return table(
        ("method", "meaning"),
        [(call(name, method), sentence(method)) for name, method in methods.items()],
    )


def trainer_attributes() -> str:
    named = (
        (name, thing)
        for name, thing in vars(Trainer).items()
        if isinstance(thing, property) and thing.__doc__
    )
    return table(
        ("attribute", "meaning"), [(f"`{name}`", sentence(thing)) for name, thing in named]
    )


def module_steps() -> str:
    items = re.findall(r"^- (.*?)(?=^- |\Z)", inspect.getdoc(Module) or "", re.S | re.M)
    return "\n".join(
        textwrap.fill(
            f"- {markdown(item)}",
            100,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )


def module_table() -> str:
    methods = {name: thing for name, thing in vars(Module).items() if inspect.isfunction(thing)}
    parts, left = [], dict(methods)
    for heading, prefixes in MODULE_SECTIONS.items():
        if heading == "Training":  # on_before_batch_transfer etc. are in "Batches"
            left = {
                name: thing for name, thing in left.items() if not name.endswith("_batch_transfer")
            }
        names = [name for name in left if name.startswith(prefixes)]
        calls: dict[str, list[str]] = {}  # methods with one text share a row
        for name in names:
            calls.setdefault(sentence(left[name]), []).append(call(name, left[name]))
        rows = [(", ".join(found), text) for text, found in calls.items()]
        parts.append(f"### {heading}\n\n" + table(("method", "when it is called"), rows))
        left = {name: thing for name, thing in left.items() if name not in names}
    return "\n\n".join(parts)


def datamodule_table() -> str:
    methods = {
        name: thing
        for name, thing in vars(DataModule).items()
        if inspect.isfunction(thing) and not name.startswith("_")
    }
    return table(
        ("method", "meaning"),
        [(call(name, method), sentence(method)) for name, method in methods.items()],
    )


def log_table() -> str:
    defaults = inspect.signature(Module.log).parameters
    rows = []
    for name, text in arguments(Module.log).items():
        default = defaults[name].default
        rows.append(
            (f"`{name}`", "" if default is inspect.Parameter.empty else f"`{default!r}`", text)
        )
    return table(("argument", "default", "meaning"), rows)


GENERATED = {
    "trainer": trainer_table,
    "methods": trainer_methods,
    "attributes": trainer_attributes,
    "steps": module_steps,
    "module": module_table,
    "datamodule": datamodule_table,
    "log": log_table,
}


def rooms_table() -> str:
    """Return the rooms of core, as ``tests/tools/import_rules.py --picture`` prints them."""
    rules = Path(__file__).parents[1] / "tests" / "tools" / "import_rules.py"
    table: str = runpy.run_path(str(rules))["picture"]()
    return table


def filled(page: str, now: str, parts: dict[str, Callable[[], str]]) -> str:
    """Return a page with new generated parts; the text between them is unchanged.

    Raises:
        ValueError: the page has no place for a part.
    """
    for name, make in parts.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, found, rest = now.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"docs/{page} has no {begin} ... {end}")
        now = f"{before}{begin}\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return now


def options_page(now: str) -> str:
    """Return docs/options.md with new generated parts."""
    return filled("options.md", now, GENERATED)


# --- both -----------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return each generated page with its correct content."""
    options, flow = DOCS / "options.md", DOCS / "how-a-run-flows.md"
    return {
        DOCS / "hooks.md": hooks_page(),
        DOCS / "plugin-api.md": api_page(),
        options: options_page(options.read_text(encoding="utf-8")),
        flow: filled(flow.name, flow.read_text(encoding="utf-8"), {"rooms": rooms_table}),
    }


def stale() -> list[Path]:
    """Return the generated pages whose content is outdated."""
    return [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page is stale"
    )
    if parser.parse_args().check:
        old = stale()
        for path in old:
            print(f"{path} is stale. Fix: python docs/make_reference.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
