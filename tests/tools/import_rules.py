"""Check that core's rooms import only rooms above them, and plugins only core's public modules.

Run it as ``python tests/tools/import_rules.py``. A room is a file or folder of core/src/geartrain.
Imports inside functions count. ``--picture`` prints the layout for the docs.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "geartrain"
#: From the bottom layer to the top: a room may import the rooms listed before it.
ROOMS = (
    *(
        "_version",
        "errors",
        "files",
        "hookspecs",
        "module",
        "options",
        "hooks",
        "plan",
        "data",
        "metrics",
        "launch",
    ),
    *("checkpoint", "loop", "builtin", "planning", "trainer", "commands", "plugin_api"),
    *(
        "accelerators",
        "strategies",
        "loggers",
        "callbacks",
        "parallel",
        "testing",
        "tuning",
        "__init__",
    ),
)
#: Types that every room may name in annotations.
CONTRACT = {
    "Run",
    "World",
    "RankCoordinator",
    "Plan",
    "PlanRequest",
    "Layout",
    "Module",
    "DataModule",
    "Trainer",
    "Hooks",
}
#: Public modules of core -> the package of another distribution that they forward to.
FORWARDS = {
    "geartrain.callbacks": "geartrain_callbacks",
    "geartrain.parallel": "geartrain_parallel",
    "geartrain.testing": "geartrain_testing",
    "geartrain.tuning": "geartrain_tools",
}
#: All modules of core that plugins may import.
DOORS = {"geartrain", "geartrain.plugin_api", *FORWARDS}


def imports(path):
    """Yield each import of geartrain's packages in a file.

    Yields:
        Module, name, line, and True if only a type checker imports it.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    typing = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("geartrain"):
            yield from (
                (node.module, one.name, node.lineno, id(node) in typing) for one in node.names
            )
        elif isinstance(node, ast.Import):
            yield from (
                (one.name, "", node.lineno, id(node) in typing)
                for one in node.names
                if one.name.startswith("geartrain")
            )


def sources(folder):
    return sorted(path for path in folder.rglob("*.py") if "templates" not in path.parts)


def module_of(path, base):
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def wrong_in_core():
    """Yield errors of core's imports; build the graph and search it for cycles."""
    modules = {module_of(path, CORE.parent): path for path in sources(CORE)}
    graph = {}
    for module, path in modules.items():
        room = path.relative_to(CORE).parts[0].removesuffix(".py")
        graph[module] = set()
        for source, name, line, typing in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if source.partition(".")[0] != "geartrain":
                if not typing:
                    yield f"{where}: core imports the plugin {source}"
                continue
            target = f"{source}.{name}" if f"{source}.{name}" in modules else source
            other = [*target.split("."), "__init__"][1]
            if not typing:
                graph[module].add(target)
            if ROOMS.index(other) > ROOMS.index(room) and not (typing and name in CONTRACT):
                message = f"{room} imports {name or target} of {other}, which is a room below it"
                yield f"{where}: {message}"
    yield from (f"a cycle of imports: {' -> '.join(cycle)}" for cycle in cycles(graph))


def cycles(graph):
    """Yield cycles: one list of modules for each module that begins a cycle."""
    done = set()

    def search(module, above):
        if module in above:
            yield [*above[above.index(module) :], module]
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                if other != module:
                    yield from search(other, [*above, module])
            done.add(module)

    for module in sorted(graph):
        yield from search(module, [])


def wrong_in_plugins():
    """Yield errors of the plugins' imports."""
    for base in sorted(ROOT.glob("plugins/*/*/src")):
        graph, declared = {}, (base.parent / "pyproject.toml").read_text(encoding="utf-8")
        for path in sources(base):
            module = module_of(path, base)
            graph[module] = set()
            for source, name, line, typing in imports(path):
                where, package = (
                    f"{path.relative_to(ROOT)}:{line}",
                    FORWARDS.get(source, source.partition(".")[0]),
                )
                if (
                    package == "geartrain"
                    and source not in DOORS
                    and f"{source}.{name}" != "geartrain.hookspecs"
                ):
                    yield f"{where}: a plugin imports {source}. Fix: geartrain.plugin_api"
                elif package != module.partition(".")[0] and any(
                    part.startswith("_") and not part.endswith("__")
                    for part in f"{source}.{name}".split(".")
                ):
                    yield f"{where}: {source}.{name} is private to {package}"
                elif (
                    not typing
                    and package not in ("geartrain", module.partition(".")[0])
                    and f'"{package.replace("_", "-")}>=' not in declared
                ):
                    message = f"it imports {package}, which its pyproject.toml does not declare"
                    yield f"{where}: {message}"
                elif not typing:
                    graph[module].add(
                        f"{source}.{name}"
                        if (base / Path(*source.split("."), f"{name}.py")).exists()
                        else source
                    )
        yield from (f"a cycle of imports: {' -> '.join(cycle)}" for cycle in cycles(graph))


def picture():
    """Return the layout of core as a table: rooms of 50 lines or more, their lines and purpose."""
    rows = []
    for room in ROOMS[:-1]:
        paths = [
            path
            for path in sources(CORE)
            if path.relative_to(CORE).parts[0].removesuffix(".py") == room
        ]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        home = next(path for path in paths if path.name == "__init__.py" or len(paths) == 1)
        what = (ast.get_docstring(ast.parse(home.read_text(encoding="utf-8"))) or "").partition(
            "\n"
        )[0]
        if lines >= 50:
            rows.append(f"| `{room}` | {round(lines, -2):,} | {what} |")
    return "\n".join(["| room | lines | purpose |", "|---|---:|---|", *rows])


def main():
    if "--picture" in sys.argv[1:]:
        print(picture())
        return
    wrong = [*wrong_in_core(), *wrong_in_plugins()]
    names = {path.name for path in CORE.iterdir()} - {"__pycache__"}
    if len(names) > 27:
        wrong.append(f"{CORE.relative_to(ROOT)} has {len(names)} names, and should have at most 27")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"imports follow tests/tools/import_rules.py: {len(names)} names in core")


if __name__ == "__main__":
    main()
