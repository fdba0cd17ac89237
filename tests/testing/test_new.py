"""The command ``geartrain new KIND NAME``: names, errors, files.

tests/testing/test_new_packages.py installs the packages.
"""

import ast
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import geartrain
from geartrain.hooks.plugin_info import GROUPS
from geartrain.hookspecs import CONTRACT
from geartrain_testing.new import _LONGEST, _TEMPLATES, _TRY

#: The kinds that write a plugin.
KINDS = [kind for kind in _TRY if kind != "project"]


def use_of(kind, name):
    """Return the text to type on the command line to use a package."""
    if kind == "command":
        return f"geartrain {name}"
    return f"--{'plugin' if kind == 'logger' else kind} {name}"


@pytest.fixture
def new(command):
    """``new("strategy tandem")``: write a package and return the output."""

    def write(line):
        done = command(f"new {line}")
        assert done.code == 0, done.err
        return done.out

    return write


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["the kind is missing", "strategy"]),
        ("strategy", ["the strategy's name is missing", "geartrain new strategy NAME"]),
        ("stratgy tandem", ["'stratgy'", "Did you mean 'strategy'?"]),
        ("strategies tandem", ["Did you mean 'strategy'?"]),
        ("strategy tandem more", ["more"]),
        ("strategy tandem --out x", ["--out", "--output"]),
        ("strategy tandem --output", ["--output"]),
        # a name's form
        ("strategy Tandem", ["'Tandem'", "lower-case", "Fix: geartrain new strategy tandem"]),
        ("strategy 'my own'", ["Fix: geartrain new strategy my_own"]),
        ("strategy my.own", ["Fix: geartrain new strategy my_own"]),
        ("strategy ../up", ["Fix: geartrain new strategy up"]),
        ("strategy 2fast", ["Fix: geartrain new strategy fast"]),
        ("strategy 2", ["'2'", "lower-case"]),
        ("strategy a--b", ["Fix: geartrain new strategy a_b"]),
        ("strategy tandem_", ["Fix: geartrain new strategy tandem"]),
        ("strategy ''", ["lower-case"]),
        ("strategy tändem", ["lower-case"]),
        (f"strategy {'a' * (_LONGEST + 1)}", [f"{_LONGEST + 1} characters", str(_LONGEST)]),
        # a name that is in use
        ("strategy single", ["installed", "geartrain[single]", "another name"]),
        ("plugin single", ["installed", "strategy geartrain[single]"]),
        ("plugin door_bell", ["installed", "geartrain-chip[door-bell]"]),
        ("strategy ddp", ["strategy of geartrain-ddp", "pip install geartrain-ddp"]),
        ("plugin ddp-spawn", ["strategy of geartrain-spawn"]),
        ("accelerator cuda", ["geartrain-cuda"]),
        ("accelerator auto", ["already has a meaning"]),
        ("plugin model", ["already has a meaning", "my_model"]),
        (
            "plugin max-epochs",
            ["option of geartrain's command line (--max-epochs)", "my_max-epochs"],
        ),
        ("plugin resume", ["option of geartrain's command line", "Fix: "]),
        # a project's name
        ("project", ["the project's name is missing", "geartrain new project NAME"]),
        ("project 1bad", ["a project's name", "Fix: geartrain new project bad"]),
        ("project my-net", ["one _ between words", "Fix: geartrain new project my_net"]),
        ("project ../up", ["Fix: geartrain new project up"]),
        ("project class", ["'class' is a keyword of Python", "Fix: use another name", "my_class"]),
        ("project torch", ["installed Python module, which torch.py would hide", "my_torch"]),
        (f"project {'a' * (_LONGEST + 1)}", [f"{_LONGEST + 1} characters", str(_LONGEST)]),
    ],
)
def test_wrong_new_usage_is_refused(chip, refused, folder, line, words):
    before = files(folder)
    message = refused(f"new {line}")
    for word in words:
        assert word in message
    assert files(folder) == before


def test_the_name_of_an_importable_package_is_refused(refused, folder, monkeypatch):
    (folder / "geartrain_tandem").mkdir()
    (folder / "geartrain_tandem" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(folder)
    assert "a package geartrain_tandem, as" in refused("new plugin tandem")


def test_nothing_is_overwritten(new, refused, folder):
    new("strategy tandem")
    (folder / "geartrain-tandem" / "README.md").write_text("changed by its author")
    before = files(folder)
    message = refused("new strategy tandem")
    assert (
        "geartrain-tandem exists and is not empty; nothing was written.\nFix: --output DIR"
        in message
    )
    assert files(folder) == before


def test_a_file_in_the_way_is_refused(refused, folder):
    (folder / "there").write_text("")
    assert "there exists" in refused("new plugin tandem --output there")
    assert "cannot be written" in refused("new plugin tandem --output there/below")


# --- written files --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_prints_the_files_and_the_next_commands(new, folder, kind):
    printed = new(f"{kind} tandem")
    wrote, _, following = printed.partition("next:\n")
    assert wrote.splitlines()[0] == "wrote geartrain-tandem/"
    assert {line.strip() for line in wrote.splitlines()[1:]} == set(
        files(folder / "geartrain-tandem")
    )
    install, test, use = (line.strip() for line in following.splitlines())
    assert install == 'pip install -e "./geartrain-tandem[test]"'
    assert test == "pytest geartrain-tandem"
    assert use_of(kind, "tandem") in use


def test_output_names_the_folder(new, folder):
    (folder / "empty").mkdir()
    assert "pytest empty\n" in new("plugin tandem --output empty")
    new(f"plugin tandem --output {folder}/deep/er")
    assert files(folder / "empty") == files(folder / "deep" / "er") != {}


def test_twice_writes_the_same(new, folder):
    for output in ("one", "two"):
        new(f"strategy tandem --output {output}")
    assert files(folder / "one") == files(folder / "two")


def test_a_project_is_in_a_folder_of_its_name(new, refused, folder):
    printed = new("project my_net")
    written = files(folder / "my_net")
    wrote, _, following = printed.partition("next:\n")
    assert sorted(wrote.split()) == sorted(["wrote", "my_net/", *written])
    assert [line.strip() for line in following.splitlines()] == [
        "cd my_net",
        "pytest",
        "geartrain fit my_net.py --config config.yaml",
    ]
    assert set(written) == {
        "README.md",
        "config.yaml",
        "my_net.py",
        "pyproject.toml",
        "test_my_net.py",
    }
    assert not [path for path, text in written.items() if re.search("mine", path + text, re.I)]
    assert "my_net exists and is not empty" in refused("new project my_net")


def test_a_project_is_pytests_root(new, folder):
    """Otherwise the settings of a folder above, such as a repository's, would apply."""
    new("project my_net")
    settings = tomllib.loads((folder / "my_net" / "pyproject.toml").read_text())["tool"]
    assert settings["pytest"]["ini_options"] == {"pythonpath": ["."]}


def test_a_project_may_have_the_name_of_a_folder(new, folder, monkeypatch):
    (folder / "my_net").mkdir()  # Python can import it, without a file
    monkeypatch.syspath_prepend(folder)
    new("project my_net")


def test_a_new_project_trains_and_its_tests_pass(new, folder, command, monkeypatch):
    new("project my_net")
    monkeypatch.chdir(folder / "my_net")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the project's folder
    try:
        done = command("fit my_net.py --config config.yaml --max-epochs 5 --accelerator cpu")
        assert done.code == 0, done.err
        assert re.search(r"val_acc\W+0\.9", done.out), done.out
        assert "saved in runs/my_net-1\n" in done.out
        import test_my_net

        test_my_net.test_config()
    finally:
        for name in ("my_net", "test_my_net"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "package", "title"),
    [
        ("tandem", "tandem", "Tandem"),
        ("my-own", "my_own", "MyOwn"),
        ("a_1", "a_1", "A1"),
        ("none", "none", "None"),
    ],
)
def test_package(new, folder, kind, name, package, title):
    new(f"{kind} {name} --output it")
    written = files(folder / "it")
    assert {
        "README.md",
        "pyproject.toml",
        f"src/geartrain_{package}/__init__.py",
        f"tests/test_{package}.py",
    } <= set(written)
    assert written[f"src/geartrain_{package}/py.typed"] == ""
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == f"geartrain-{package.replace('_', '-')}"
    made = "command" if kind == "command" else f"{title}{kind.capitalize()}"
    assert project["entry-points"] == {
        GROUPS["plugin" if kind == "logger" else kind]: {name: f"geartrain_{package}:{made}"},
        "geartrain.contract": {str(CONTRACT): "geartrain.hookspecs:CONTRACT"},
    }
    assert use_of(kind, name) in written["README.md"]
    trees = [ast.parse(text) for path, text in written.items() if path.endswith(".py")]
    assert made in {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert not [path for path, text in written.items() if re.search("mine", path + text, re.I)]


def test_a_kind_in_the_name_is_not_repeated_in_the_class(new, folder):
    new("strategy tandem_strategy")
    assert (
        "geartrain_tandem_strategy:TandemStrategy"
        in (folder / "geartrain-tandem-strategy" / "pyproject.toml").read_text()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_dependencies_are_of_this_version_and_have_reasons(new, folder, kind):
    new(f"{kind} tandem")
    text = (folder / "geartrain-tandem" / "pyproject.toml").read_text()
    major, minor, *_ = geartrain.__version__.split(".")
    project = tomllib.loads(text)["project"]
    assert f"geartrain>={major}.{minor},<{int(major) + 1}" in project["dependencies"]
    for dependency in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        assert re.search(rf'"{re.escape(dependency)}"\W+# \w', text), f"{dependency} has no reason"


def test_conformance_test_is_five_lines():
    text = (_TEMPLATES / "strategy" / "tests" / "test_mine.py").read_text()
    code = [line for line in text.splitlines() if line and not line.startswith('"""')]
    assert code == [
        "from geartrain.testing import StrategyConformance",
        "class TestMine(StrategyConformance):",
        '    strategy = "mine"',
    ]


def test_compiled_templates_and_caches_are_not_written(new, folder, tmp_path, monkeypatch):

    copy = tmp_path / "copy"
    shutil.copytree(_TEMPLATES, copy)
    for place in (".ruff_cache", "src/geartrain_mine/__pycache__"):
        (copy / "plugin" / place).mkdir(exist_ok=True, parents=True)
        (copy / "plugin" / place / "binary").write_bytes(b"\x89")
    monkeypatch.setattr("geartrain_testing.new._TEMPLATES", copy)
    new("plugin tandem")
    assert not [path for path in files(folder / "geartrain-tandem") if "cache" in path]


# --- without torch --------------------------------------------------------------------------------


def test_neither_torch_nor_a_plugin_is_imported(python, folder):
    code = """
import sys
sys.modules["torch"] = None
from geartrain.commands import main
code = main(["new", "strategy", "tandem"])
tools = ("geartrain_testing", "geartrain_cli")
found = [name for name in sys.modules if name.startswith(("torch.", "geartrain_"))]
print([name for name in found if not name.startswith(tools)])
sys.exit(code)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert Path(folder, "geartrain-tandem", "pyproject.toml").exists()


def test_is_in_the_help(command):
    assert "new  " in command("--help").out
    assert "KIND" in command("new --help").out
