"""``geartrain explain``: the plan and the hooks, before anything runs."""

import pytest
from command_line import cells

WRAPPERS = """
from geartrain import hookimpl

class Timed:
    @hookimpl(wrapper=True)
    def step(self):
        return (yield)

    @hookimpl
    def on_step_end(self):
        pass
"""

OWN_CLIPPING = """
from geartrain import hookimpl

class OwnClipping:
    replaces = {"clip_gradients"}

    @hookimpl
    def clip_gradients(self, run):
        pass
"""


# --- starts nothing -------------------------------------------------------------------------------


def test_explain_starts_nothing(command, folder, write):
    """Neither module nor data is made; both would create a file."""
    write(
        "marked.py",
        "from pathlib import Path\nimport geartrain as gt\nfrom net import Net\n"
        "class Marked(Net):\n    def __init__(self):\n        Path('model').touch()\n"
        "        super().__init__()\n"
        "class Data(gt.DataModule):\n    def __init__(self):\n        Path('data').touch()\n"
        "    def train_dataloader(self): return []\n",
    )
    before = set(folder.iterdir())
    done = command("explain marked.py --output out --seed 1")
    assert done.code == 0
    assert {path.name for path in set(folder.iterdir()) - before} <= {"__pycache__"}


def test_explain_makes_the_same_checks_as_fit(refused):
    assert "single" in refused("explain net.py --strategy sngle")
    assert "drives one device" in refused("explain net.py --strategy single --devices 2")
    assert "TARGET comes first" in refused("explain")


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_names_each_choice_its_package_and_the_reason(plan):
    facts = plan()
    for kind, name, reason in (
        ("accelerator", "cpu", "auto"),
        ("strategy", "single", "auto"),
        ("precision", "32-true", "default"),
    ):
        assert facts[kind]["name"] == name
        assert facts[kind]["distribution"] == "geartrain"
        assert facts[kind]["version"]
        assert reason in facts[kind]["reason"]
    assert (facts["devices"], facts["processes"], facts["nodes"]) == ([0], 1, 1)
    assert [(plugin["name"], plugin["distribution"]) for plugin in facts["plugins"]] == [
        ("progress", "geartrain-callbacks")
    ]
    assert plan("--enable-progress-bar false")["plugins"] == []


def test_reasons_of_requested_choices_quote_the_command_line(plan):
    facts = plan("--accelerator cpu --strategy single --plugin my_hooks.py")
    assert facts["accelerator"]["reason"] == "--accelerator cpu"
    assert facts["strategy"]["reason"] == "--strategy single"
    assert facts["plugins"][0]["reason"] == "--plugin my_hooks.py"


@pytest.mark.usefixtures("chip")
def test_the_plan_names_alternatives_and_why_they_were_passed_over(plan):
    passed = plan()["passed_over"]
    assert "priority" in passed["geartrain-chip[chip]"]
    assert "one device" in passed["geartrain-chip[scaled]"]
    assert "blocked" in plan("--block chip")["passed_over"]["geartrain-chip[chip]"]
    assert plan("--accelerator cpu --strategy single")["passed_over"] == {}


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", (4, 4)),
        ("--data.batch-size 6 --accumulate-grad-batches 3", (6, 18)),
        ("--data.batch-size 6 --accelerator chip --devices 4 --strategy scaled", (2, 6)),
    ],
)
def test_batch_sizes(plan, words, sizes):
    """A strategy with one process splits its batch over the devices."""
    assert tuple(plan(words)["batch_size"].values()) == sizes


def test_batch_size_is_unknown_if_the_data_has_no_such_option(command, write):
    write("mine.py", "from net import Net\nclass Mine(Net): ...\n")
    assert command("explain mine.py --json").facts["batch_size"] == {
        "per_device": None,
        "global": None,
    }
    assert "known when the loaders are made" in command("explain mine.py").out


@pytest.mark.usefixtures("chip")
def test_missing_hardware_can_be_assumed(plan, refused):
    facts = plan("--accelerator chip --assume chip=8 --devices 8 --strategy scaled")
    assert facts["devices"] == list(range(8))
    assert "only [0, 1, 2, 3]" in refused(
        "explain net.py --accelerator chip --devices 8 --strategy scaled"
    )
    assert "ACCELERATOR=COUNT" in refused("explain net.py --assume chip")
    assert "geartrain explain" in refused("fit net.py --assume chip=8")


# --- the hooks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chip")
def test_hooks_name_all_plugins_in_call_order(plan, write):
    write("timed.py", WRAPPERS)
    write("timed_too.py", WRAPPERS)
    hooks = plan(
        "--accelerator chip --devices 1 --strategy scaled --plugin bell --plugin timed.py "
        "--plugin timed_too.py"
    )["hooks"]
    assert hooks["step"] == ["timed_too", "timed", "defaults"]
    assert hooks["on_step_end"] == ["timed_too", "timed", "progress"]
    assert hooks["on_run_start"] == ["bell", "progress"]
    assert (hooks["barrier"], hooks["teardown_device"], hooks["forward"]) == (
        ["scaled"],
        ["chip"],
        ["defaults"],
    )
    assert hooks["device_stats"] == []


def test_all_hooks_are_listed_in_the_order_of_the_hookspecs(plan):
    from geartrain import hookspecs

    marked = [name for name, thing in vars(hookspecs).items() if hasattr(thing, "geartrain_spec")]
    assert len(marked) > 30
    assert list(plan()["hooks"]) == marked


def test_options_that_are_plugins_of_core_show_as_such(plan):
    assert plan("--gradient-clip-val 1")["hooks"]["clip_gradients"] == ["clipping"]
    hooks = plan("--output out")["hooks"]
    assert "folder" in hooks["on_run_start"]
    assert "last_checkpoint" in hooks["on_epoch_end"]
    assert plan("--enable-progress-bar false")["hooks"]["on_step_end"] == []


@pytest.mark.usefixtures("chip")
def test_the_table_names_owner_wrappers_and_passed_over_plugins(command, write):
    write("timed.py", WRAPPERS)
    write("own.py", OWN_CLIPPING)
    done = command(
        "explain net.py --strategy scaled --plugin timed.py --plugin own.py --gradient-clip-val 1 "
        "--data.batch-size 8 --hooks"
    )
    assert (done.code, done.err) == (0, "")
    assert cells(done.out, "strategy")[1:] == ["scaled (geartrain-chip 1.0)", "--strategy scaled"]
    assert cells(done.out, "batch size")[1] == "global 8"
    assert cells(done.out, "step")[1:] == ["defaults; wrapped by timed"]
    (clipping,) = cells(done.out, "clip_gradients")[1:]
    assert clipping == "own; passed over: defaults, clipping (own owns it)"
    assert cells(done.out, "plan_processes")[1].startswith("scaled")


def test_a_typical_plan_fits_one_screen(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = command("explain net.py --max-epochs 9 --seed 1")
    assert "options\n  max_epochs=9, seed=1\n" in done.out
    assert len(done.out.splitlines()) < 24
    assert max(map(len, done.out.splitlines())) <= 80
    assert "reduce_gradients" not in done.out
    assert "--hooks lists the plugins" in done.out
