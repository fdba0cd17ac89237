"""docs/hooks.md, docs/plugin-api.md and docs/options.md are complete and correct."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import geartrain as gt
from geartrain import hookspecs, plugin_api
from geartrain.planning.registry import Registry
from geartrain_cli.arguments import Names, build_parser
from geartrain_tools.tuner.command import _OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = [name for name, thing in vars(hookspecs).items() if hasattr(thing, "geartrain_spec")]
ARGUMENTS = [
    name
    for name, p in inspect.signature(gt.Trainer).parameters.items()
    if p.kind is not p.VAR_KEYWORD
]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return _load(DOCS / "make_reference.py")


@pytest.fixture(scope="module")
def options():
    return (DOCS / "options.md").read_text(encoding="utf-8")


# --- not stale ------------------------------------------------------------------------------------


def test_generated_pages_are_not_stale(reference):
    assert [path.name for path in reference.stale()] == [], "Fix: python docs/make_reference.py"


def test_writing_twice_changes_nothing(reference):
    page = reference.options_page((DOCS / "options.md").read_text(encoding="utf-8"))
    assert reference.options_page(page) == page


@pytest.fixture
def stale(reference, tmp_path, monkeypatch):
    """Return a copy of the reference with an outdated hooks.md."""
    for name in ("options.md", "hooks.md", "plugin-api.md", "how-a-run-flows.md"):
        (tmp_path / name).write_bytes((DOCS / name).read_bytes())
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    (tmp_path / "hooks.md").write_text("old")
    return tmp_path / "hooks.md"


def test_check_names_the_stale_page_and_changes_nothing(reference, stale, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_reference.py", "--check"])
    assert reference.main() == 1
    printed = capsys.readouterr().err
    assert "hooks.md is stale" in printed
    assert "options.md" not in printed
    assert stale.read_text() == "old"


def test_command_rewrites_the_stale_page(reference, stale, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_reference.py"])
    assert reference.main() == 0
    assert stale.read_bytes() == (DOCS / "hooks.md").read_bytes()


def test_a_part_without_its_place_is_an_error(reference, options):
    with pytest.raises(ValueError, match="generated: trainer"):
        reference.options_page(options.replace("<!-- generated: trainer -->", ""))


# --- hooks.md -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_section(hook, reference):
    page = (DOCS / "hooks.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {hook}\n\n(.*?)(?=^##|\Z)", page, re.S | re.M)
    assert found, f"docs/hooks.md has no section '### {hook}'"
    spec = getattr(hookspecs, hook)
    signature, about, *_ = found[1].split("\n\n")
    calls = "single" if spec.geartrain_spec["firstresult"] else "every"
    assert signature == f"`{reference.signature(hook, spec)}` · {calls}"
    assert about
    assert "**Fired:**" in found[1]
    if spec.geartrain_spec["firstresult"]:
        assert "**Default:**" in found[1]


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_in_the_picture_or_called_on_demand(hook):
    picture = (DOCS / "how-a-run-flows.svg").read_text(encoding="utf-8")
    assert f">{hook}</" in picture or hook in (
        "all_gather",
        "barrier",
        "broadcast",
        "device_stats",
        "find_checkpoint",
        "load_model_state",
        "log_media",
        "make_coordinator",
        "model_state",
    )


def test_fields_keep_their_lines_together(reference):
    about, fields = reference.fields("""Do it.

    Fired: once,
        or twice.
    Returns: ``None``.
    """)
    assert about == "Do it."
    assert fields == {"Fired": "once, or twice.", "Returns": "`None`."}


# --- plugin-api.md --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plugin_api.__all__)
def test_a_name_of_plugin_api_has_a_section_with_its_purpose(name):
    page = (DOCS / "plugin-api.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {name}\n\n(.*?)(?=^##|\Z)", page, re.S | re.M)
    assert found, f"docs/plugin-api.md has no section '### {name}'"
    call = re.compile(rf"`{name}\(.*\)`")
    texts = [text.strip() for text in found[1].split("\n\n") if not call.fullmatch(text.strip())]
    assert texts[0]
    assert not texts[0].startswith(("|", "- "))


def test_a_name_without_a_place_on_the_page_is_an_error(reference, monkeypatch):
    monkeypatch.setitem(reference.API_SECTIONS, "Files", ("replacing", "remove_abandoned"))
    with pytest.raises(ValueError, match="differs in AppendedFile"):
        reference.api_page()


def test_defaults_of_this_machine_are_not_on_the_page(reference):
    assert reference.api_call("detect", plugin_api.detect) == "`detect(environ=...)`"


# --- options.md -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_trainer_argument_is_in_the_table(argument, options):
    row = re.search(rf"^\| `{argument}` \| `--[^|]+` \| `[^|]+` \| (.+) \|$", options, re.M)
    assert row, (
        f"docs/options.md has no row for {argument!r}. Fix: document it in Trainer's docstring, "
        "python docs/make_reference.py"
    )


@pytest.mark.parametrize(
    "command", ["fit", "validate", "test", "predict", "explain", "tune lr", "tune batch-size"]
)
def test_command_line_option_is_on_the_page(command, options):
    own = _OPTIONS[command.removeprefix("tune ")] if command.startswith("tune") else {}
    parser, _ = build_parser(command, None, Names(), Registry(), own)
    missing = []
    for action in parser._actions:
        for option in action.option_strings:
            spelt = option.replace("_", "-").replace("--plugins", "--plugin")
            if (
                option.startswith("--")
                and not option.endswith("+")
                and not re.search(rf"`{spelt}[ `]", options)
            ):
                missing.append(option)
    assert not missing


@pytest.mark.parametrize("option", ["--json", "--probe", "--block"])
def test_option_of_the_command_plugins_is_on_the_page(option, options):
    assert re.search(rf"^\| `{option}[ `].*(plugins|\| all \|)", options, re.M)


def test_every_method_that_a_module_may_override_is_on_the_page(options):
    own = [
        name
        for name, thing in vars(gt.Module).items()
        if inspect.isfunction(thing) and not name.startswith("_")
    ]
    assert [
        name for name in own if f"`{name}(" not in options and f"self.{name}(" not in options
    ] == []
    on_page = re.search(r"^## The module$.*?^### self.log$", options, re.S | re.M)
    assert on_page
    assert [name for name in own if name.startswith("on_") and f"`{name}(" not in on_page[0]] == []


# --- write-a-plugin.md ----------------------------------------------------------------------------


def test_core_makes_every_refusal_in_the_table():
    page = (DOCS / "write-a-plugin.md").read_text(encoding="utf-8")
    table = re.search(r"^\| the error says.*?\n\n", page, re.S | re.M)
    assert table
    said = re.findall(r"^\| `([^|]+)` \|", table[0], re.M)
    source = "".join(
        path.read_text(encoding="utf-8") for path in Path(gt.__file__).parent.rglob("*.py")
    )
    assert len(said) > 10
    assert [
        message for message in said if not all(part in source for part in message.split("..."))
    ] == []


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page, reference):
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    ):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        headings = (
            re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            if target.suffix == ".md" and target.exists()
            else []
        )
        if not target.exists() or (anchor and anchor not in map(reference.anchor, headings)):
            broken.append(link)
    assert broken == []
