"""Options on the command line: spelling, types, choices, and the options of selected plugins."""

import re
import shutil

import pytest

FUNCTIONS = """
from geartrain import hookimpl

@hookimpl
def on_step_end(run):
    print("function", run.step)
"""


pytestmark = pytest.mark.usefixtures("chip")

# --- spelling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--max-epochs 7", "--max_epochs=7"])
def test_dashes_and_underscores_mean_the_same(plan, words):
    assert plan(words)["options"]["max_epochs"] == 7


@pytest.mark.parametrize("words", ["--data.batch-size 8", "--data.batch_size=8"])
def test_dashes_and_underscores_in_the_target_s_options(plan, words):
    assert plan(words)["batch_size"] == {"per_device": 8, "global": 8}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--deterministic", ("deterministic", True)),
        ("--deterministic=warn", ("deterministic", "warn")),
        ("--deterministic false", ("deterministic", False)),
        ("--fast-dev-run", ("fast_dev_run", 1)),
        ("--fast-dev-run 3", ("fast_dev_run", 3)),
        ("--enable-progress-bar false", ("enable_progress_bar", False)),
        ("--quiet", ("enable_progress_bar", False)),
        ("--deterministic -q", ("deterministic", True)),
        ("-q --max-steps 3", ("enable_progress_bar", False)),
        ("--limit-train-batches 0.5", ("limit_train_batches", 0.5)),
        ("--limit-train-batches 2", ("limit_train_batches", 2)),
        ("--max-steps -1", ("max_steps", -1)),
        ("--gradient-clip-val 1", ("gradient_clip_val", 1.0)),
        (
            "--check-val-every-n-epoch null --val-check-interval 3",
            ("check_val_every_n_epoch", None),
        ),
    ],
)
def test_values_and_bare_flags(plan, words, expected):
    name, value = expected
    found = plan(words)["options"][name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "asked"),
    [("--max-epoch 7", "--max_epoch"), ("--model.hid 2", "--model.hid")],
)
def test_an_abbreviation_is_an_unknown_option(refused, words, asked):
    """Abbreviations would let a new option of geartrain change the meaning of a script."""
    assert f"there is no option {asked}." in refused(f"explain net.py {words}")


def test_a_misspelt_quiet(refused):
    assert "'quiet'" in refused("explain net.py --quite")


def test_names_are_the_same_in_capitals(plan):
    facts = plan("--strategy SCALED --accelerator Chip --plugin Bell")
    assert [
        facts["strategy"]["name"],
        facts["accelerator"]["name"],
        facts["plugins"][0]["name"],
    ] == ["scaled", "chip", "bell"]


@pytest.mark.parametrize(("words", "found"), [("-1", [0, 1, 2, 3]), ("1,3", [1, 3])])
def test_devices_in_each_form(plan, words, found):
    facts = plan(f"--accelerator chip --strategy scaled --devices {words}")
    assert facts["devices"] == found
    assert facts["processes"] == 1


# --- options of selected plugins ------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--strategy=scaled --strategy.scale=0.5 --strategy.in_units=s",
        "--strategy.scale 0.5 --strategy.in_units s --strategy scaled",
    ],
)
def test_strategy_options(fit, words):
    assert "scale 0.5 s" in fit(words)


def test_accelerator_options(fit):
    assert "turbo True" in fit("--accelerator chip --accelerator.turbo true --devices 1")
    assert "turbo False" in fit("--accelerator chip --devices 1")


@pytest.mark.parametrize(
    "words", ["--plugin bell --bell.times 2", "--plugin=door-bell --door-bell.times=2"]
)
def test_options_of_an_installed_plugin(fit, words):
    assert "dingding\n" in fit(words)


@pytest.mark.parametrize(
    "words",
    [
        "--plugin ./my_hooks.py --my-hooks.every 3",
        "--plugin my-hooks.py --my-hooks.every 3",
        "--plugin my_hooks.py:Steps --Steps.every 3",
    ],
)
def test_options_of_a_plugin_in_a_file(fit, folder, words):
    shutil.copy(folder / "my_hooks.py", folder / "my-hooks.py")
    assert [line for line in fit(words).splitlines() if "step" in line] == ["step 3"]


def test_several_plugins_each_with_its_options(fit, write):
    """A hook that calls all plugins calls the last plugin first."""
    write("functions.py", FUNCTIONS)
    printed = fit(
        "--plugin bell --plugin my_hooks.py --plugin functions.py --my_hooks.word plop "
        "--bell.sound dong --max-steps 2"
    )
    assert [line for line in printed.splitlines() if "made" not in line] == [
        "dong",
        "function 1",
        "plop 1",
        "function 2",
        "plop 2",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--strategy.scale 2", ["--strategy.scale", "--strategy NAME"]),
        ("--strategy single --strategy.scale 2", ["--strategy.scale", "'single' takes no options"]),
        ("--strategy scaled --strategy.scale half", ["--strategy.scale", "float", "half"]),
        ("--bell.times 2", ["--bell.times", "--plugin bell"]),
        ("--plugin bell --bell.time 2", ["--bell.time.", "'bell.times'"]),
        ("--plugin functions.py --functions.every 2", ["--functions.every", "takes no options"]),
    ],
)
def test_an_option_that_no_plugin_has_is_an_error(refused, write, words, expected):
    write("functions.py", FUNCTIONS)
    error = refused(f"fit net.py {words}")
    assert all(word in error for word in expected), error


@pytest.mark.parametrize(
    "words",
    ["--plugin bell --plugin bell --bell.times 2", "--plugin my_hooks.py --plugin my_hooks.py"],
)
def test_one_plugin_given_twice_is_an_error(refused, words):
    """Two instances would do everything twice, the second without the options."""
    assert "twice" in refused(f"fit net.py --max-epochs 1 {words}")


@pytest.mark.parametrize("name", ["seed", "model"])
def test_a_plugin_s_file_cannot_have_an_option_s_name(refused, folder, name):
    shutil.copy(folder / "my_hooks.py", folder / f"{name}.py")
    error = refused(f"fit net.py --plugin {name}.py")
    assert f"--{name}" in error
    assert "rename" in error


def test_an_argument_of_a_target_that_takes_none_is_an_error(refused, write):
    write("bare.py", "import geartrain as gt\n\n\nclass Bare(gt.Module):\n    pass\n")
    error = refused("fit bare.py --data.batch_size 2")
    assert "--data.batch_size: the target has no data module with arguments" in error
    error = refused("fit bare.py --model.width 2")
    assert "--model.width: the target has no module with arguments" in error


# --- help -----------------------------------------------------------------------------------------


def test_help_shows_every_option_as_it_is_typed(command):
    done = command("fit net.py --strategy scaled --accelerator chip --plugin my_hooks.py --help")
    assert done.code == 0
    for option in (
        "--max-epochs",
        "--strategy.scale",
        "--accelerator.turbo",
        "--my-hooks.every",
        "--model.hidden",
        "--data.batch-size",
    ):
        assert option in done.out
    for words in (
        "units in the hidden layer",
        "samples in one batch",
        "--plugin NAME_OR_FILE",
        "--config",
    ):
        assert words in done.out
    assert "_options" not in done.out
    assert "the module is made" not in done.out
    plain = command("fit net.py --help").out
    assert not any(name in plain for name in ("--strategy.scale", "turbo", "--my-hooks.every"))


@pytest.mark.parametrize("line", ["fit --help", "explain -h"])
def test_help_without_a_target_shows_the_trainer_s_options(command, line):
    done = command(line)
    assert done.code == 0
    assert f"usage: geartrain {line.split()[0]}" in done.out
    assert "--max-epochs" in done.out
    assert "--model" not in done.out


def test_every_argument_of_the_trainer_has_an_option(command):
    import inspect

    from geartrain import Trainer

    shown = command("fit net.py --help-all").out
    spelt_otherwise = {
        "plugins": "--plugin ",
        "callbacks": "--plugin ",
        "accelerator_options": "--accelerator ",
        "strategy_options": "--strategy ",
    }
    for name in set(inspect.signature(Trainer).parameters) - {
        "unknown",
        "plugin_options",
        "assume",
    }:
        option = f"--{name.replace('_', '-')}"
        assert re.search(rf"^  {spelt_otherwise.get(name, option).strip()}( |$)", shown, re.M), name


# --- a plugin's name as a flag --------------------------------------------------------------------


def selected(facts):
    return [plugin["name"] for plugin in facts["plugins"]]


@pytest.mark.parametrize("words", ["--csv --csv.path a.csv", "--plugin csv --csv"])
def test_flag_selects_the_plugin_of_that_name_once(plan, words):
    assert selected(plan(f"--output out {words}")).count("csv") == 1


def test_flag_has_hyphens_or_underscores(plan):
    for words in ("--early-stopping", "--early_stopping"):
        assert "early_stopping" in selected(plan(f"{words} --early-stopping.monitor loss"))


@pytest.mark.parametrize("words", ["--csv 3", "--csv=true"])
def test_flag_with_a_value_is_refused(refused, words):
    assert "--csv takes no value.\nFix: use --csv, and --csv.OPTION VALUE" in refused(
        f"explain net.py {words}"
    )


def test_flag_of_a_plugin_that_is_not_installed_names_its_distribution(refused):
    assert "pip install geartrain-monitor" in refused("explain net.py --profile")


def test_misspelt_flag_is_refused(refused):
    assert "there is no option --cvs" in refused("explain net.py --cvs")
