"""Check that the project's surface is the one that tests/surface.json lists.

python tests/tools/surface.py           exit with 1, and name each difference
python tests/tools/surface.py --write   write the file: lists as they are, limits only lower

A user or an author of plugins meets each of these, so each addition is a decision: names of
``geartrain`` and ``geartrain.plugin_api``, hooks, entry-point groups, the options of Trainer, of
each plugin and of each command, and exit codes. The limits are lines of core, and assignments to
vague names (``what``, ``one``, ...), whose reader must look elsewhere for their meaning.
"""

import ast
import inspect
import json
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "surface.json"
CORE = ROOT / "core" / "src"
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]
VAGUE = re.compile("what|fix|why|mine|theirs|ours|own|its|one|odd|here|left|whose|said|now|rest")


def sources(folder):
    return [path for path in sorted(folder.rglob("*.py")) if "templates" not in path.parts]


def trees(folder):
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sources(folder)]


def vague(folders):
    """Return the number of assignments to vague names."""
    nodes = (node for folder in folders for tree in trees(folder) for node in ast.walk(tree))
    names = (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return sum(1 for name in names if VAGUE.fullmatch(name))


def limits():
    return {
        "lines of core": sum(path.read_text("utf-8").count("\n") for path in sources(CORE)),
        "vague names in core": vague([CORE]),
        "vague names in plugins": vague([project / "src" for project in PROJECTS[1:]]),
    }


def entry_points():
    """Yield group, name and object of each entry point of the repository's distributions."""
    for project in PROJECTS:
        settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        for group, entries in settings["project"].get("entry-points", {}).items():
            yield from ((group, name, target) for name, target in entries.items())


def parameters(function):
    signature = inspect.signature(function)
    return sorted(name for name in signature.parameters if name not in ("self", "args", "kwargs"))


def plugin_options():
    """Return the options of each strategy, accelerator, precision and plugin."""
    found = {}
    for group, name, target in entry_points():
        if group == "geartrain.implied":  # its values are names of plugins
            continue
        module, _, attribute = target.partition(":")
        value = getattr(import_module(module), attribute, None)
        if inspect.isclass(value):
            found[f"{group.partition('.')[2]}: {name}"] = parameters(value)
    return found


def command_options():
    """Return the arguments that each distribution adds to the command line's parsers."""
    found = {}
    for project in PROJECTS[1:]:
        calls = (n for tree in trees(project / "src") for n in ast.walk(tree))
        calls = [n for n in calls if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        arguments = {
            argument.value
            for call in calls
            if call.func.attr == "add_argument"
            for argument in call.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }
        if arguments:
            found[project.name] = sorted(arguments)
    return found


def exit_codes():
    """Return the numbers that the command line's functions return."""
    source = ROOT / "plugins/tools/cli/src/geartrain_cli/command_line.py"
    tree = ast.parse(source.read_text("utf-8"))
    values = (n.value for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value)
    constants = (
        n.value for value in values for n in ast.walk(value) if isinstance(n, ast.Constant)
    )
    return sorted({code for code in constants if isinstance(code, int)})


def surface():
    import geartrain
    from geartrain import hookspecs, plugin_api

    groups = {group for group, _, _ in entry_points()}
    return {
        "names of geartrain": sorted(geartrain.__all__),
        "names of geartrain.plugin_api": sorted(dir(plugin_api)),
        "hooks": sorted(n for n, v in vars(hookspecs).items() if hasattr(v, "geartrain_spec")),
        "entry-point groups": sorted(groups),
        "options of Trainer": parameters(geartrain.Trainer),
        "options of plugins": plugin_options(),
        "options of commands": command_options(),
        "exit codes": exit_codes(),
    }


def flat(value, path=""):
    """Yield each name of the surface with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}{key}: ")
    else:
        yield from (f"{path}{name}" for name in value)


def differences(found, measured, listed):
    """Return what the file does not list, what only the file has, and limits that are exceeded."""
    names = set(flat(found))
    known = set(flat({key: value for key, value in listed.items() if key != "limits"}))
    allowed = listed["limits"]
    return [
        *(f"new: {name}" for name in sorted(names - known)),
        *(f"gone: {name}" for name in sorted(known - names)),
        *(
            f"{name}: {number}, and the limit is {allowed[name]}"
            for name, number in measured.items()
            if number > allowed[name]
        ),
    ]


def main():
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    found, measured = surface(), limits()
    if "--write" in sys.argv[1:]:
        lowest = {name: min(number, listed["limits"][name]) for name, number in measured.items()}
        text = json.dumps({"limits": lowest, **found}, indent=2) + "\n"
        FILE.write_text(text, encoding="utf-8")
        return
    errors = differences(found, measured, listed)
    if errors:
        fix = "leave it out, or run tests/tools/surface.py --write and say why in the commit"
        sys.exit("\n".join([*errors, f"Fix: {fix}. A limit only falls: make the code smaller."]))
    print("the surface is the one that tests/surface.json lists")


if __name__ == "__main__":
    main()
