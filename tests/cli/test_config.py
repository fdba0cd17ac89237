"""``--config FILE`` and ``--print-config``."""

import pytest
import yaml

pytestmark = pytest.mark.usefixtures("chip")

# --- content of a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "max_epochs: 7\ndata:\n  batch_size: 8\n",
        "max-epochs: 7\ndata.batch-size: 8\n",
        "max-epochs: 7\ndata:\n  batch-size: 8\n",
    ],
    ids=["nested", "dashes", "nested dashes"],
)
def test_spelling(plan, write, text):
    write("conf.yaml", text)
    facts = plan("--config conf.yaml")
    assert facts["options"]["max_epochs"] == 7
    assert facts["batch_size"]["per_device"] == 8


@pytest.mark.parametrize(
    "text",
    [
        "strategy.scale: 0.5\nstrategy.in_units: s\nstrategy: scaled",
        "strategy: scaled\nstrategy_options: {scale: 0.5, in_units: s}",
        "strategy: {name: scaled, scale: 0.5, in-units: s}",
    ],
    ids=["dotted first", "options", "mapping with dashes"],
)
def test_strategy_with_options(fit, write, text):
    write("conf.yaml", text)
    assert "scale 0.5 s" in fit("--config conf.yaml")


def test_keys_inside_an_option_are_the_user_s(fit, write):
    write(
        "mine.py",
        "from net import Data as D, Net\nclass Mine(Net):\n"
        "    def __init__(self, sizes: dict[str, int]):\n"
        "        super().__init__()\n        print(sizes)\nclass Data(D): ...\n",
    )
    write("conf.yaml", "model:\n  sizes: {first-layer: 3}\n")
    assert "{'first-layer': 3}" in fit("--config conf.yaml", target="mine.py")


@pytest.mark.parametrize("text", ["plugins: [bell, my_hooks.py]", "plugin: [bell, my_hooks.py]"])
def test_plugins_with_options(fit, write, text):
    write("conf.yaml", f"{text}\nbell: {{sound: dong}}\nmy_hooks.every: 3\n")
    printed = fit("--config conf.yaml").splitlines()
    assert "dong" in printed
    assert [line for line in printed if "step" in line] == ["step 3"]


def test_one_plugin_needs_no_list(fit, write):
    write("conf.yaml", "plugin: bell\n")
    assert "ding" in fit("--config conf.yaml")


def test_blocked_names(refused, write):
    write("conf.yaml", "block: [bell]\n")
    assert "geartrain-chip[bell] is blocked" in refused(
        "fit net.py --config conf.yaml --plugin bell"
    )


# --- precedence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["--config conf.yaml --max-epochs 2", "--max-epochs=2 --config=conf.yaml"]
)
def test_the_command_line_overrides_the_file_in_any_order(plan, write, words):
    write("conf.yaml", "max_epochs: 7\nseed: 3\ndata: {batch_size: 8, samples: 32}\n")
    facts = plan(f"{words} --data.batch-size 2")
    assert (
        facts["options"]["max_epochs"],
        facts["options"]["seed"],
        facts["batch_size"]["per_device"],
    ) == (2, 3, 2)


def test_strategy_options_of_the_command_line_win(fit, write):
    write("conf.yaml", "strategy: {name: scaled, scale: 0.5, in_units: s}\n")
    assert "scale 2.0 s" in fit("--config conf.yaml --strategy.scale 2")


def test_strategy_of_the_command_line_wins(plan, write):
    write("conf.yaml", "strategy: single\naccelerator: cpu\n")
    facts = plan("--config conf.yaml --strategy scaled")
    assert (facts["strategy"]["name"], facts["accelerator"]["name"]) == ("scaled", "cpu")


def test_plugins_of_both_come_together_those_of_the_file_first(plan, fit, write):
    write("conf.yaml", "plugins: [bell]\nbell: {times: 2}\n")
    assert [
        choice["name"] for choice in plan("--config conf.yaml --plugin my_hooks.py")["plugins"]
    ] == ["bell", "my_hooks", "progress"]
    printed = fit(
        "--config conf.yaml --plugin my_hooks.py --my_hooks.every 4 --bell.sound dong"
    ).splitlines()
    assert "dongdong" in printed
    assert "step 4" in printed


def test_a_later_file_wins_and_keeps_the_rest(plan, write):
    write("one.yaml", "max_epochs: 7\nseed: 3\ndata: {batch_size: 8, samples: 32}\n")
    write("two.yaml", "max_epochs: 2\ndata: {batch_size: 2}\n")
    facts = plan("--config one.yaml --config two.yaml")
    assert (
        facts["options"]["max_epochs"],
        facts["options"]["seed"],
        facts["batch_size"]["per_device"],
    ) == (2, 3, 2)


# --- --print-config -------------------------------------------------------------------------------

OPTIONS = (
    "--strategy scaled --strategy.scale 0.5 --plugin bell --bell.times 2 --plugin my_hooks.py "
    "--my_hooks.every 3 --max-epochs 2 "
    "--limit-train-batches 0.5 --data.batch-size 8 --model.lr 0.25 --seed 4 --deterministic "
    "--devices 1 --output out"
)


def test_print_config_prints_every_value_and_makes_nothing(command, folder):
    done = command(f"fit net.py {OPTIONS} --print-config")
    assert done.code == 0
    values = yaml.safe_load(done.out)
    assert values["model"] == {"hidden": 4, "lr": 0.25}
    assert values["plugins"] == ["bell", "my_hooks.py"]
    assert (values["strategy"], values["max_epochs"], values["max_steps"]) == ("scaled", 2, -1)
    assert not (folder / "out").exists()


def test_the_output_of_print_config_means_the_same_when_read(command, fit, write):
    printed = command(f"fit net.py {OPTIONS} --print-config").out
    write("conf.yaml", printed)
    assert command("fit net.py --config conf.yaml --print-config").out == printed
    # The file also runs: an epoch has 2 batches of 8, half of them are used, for 3 epochs.
    lines = fit("--config conf.yaml --max-epochs 3").splitlines()
    assert "scale 0.5 ms" in lines
    assert "dingding" in lines
    assert [line for line in lines if line.startswith("step")] == ["step 3"]


@pytest.mark.parametrize(("one", "other"), [("explain", "fit"), ("fit", "test")])
def test_one_commands_print_config_works_with_another(command, write, one, other):
    """A user can check a file with explain and then run it."""
    write(
        "conf.yaml",
        command(f"{one} net.py --max-epochs 2 --enable-progress-bar false --print-config").out,
    )
    done = command(f"{other} net.py --config conf.yaml")
    assert (done.code, done.err) == (0, "")


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_epoch: 7", ["max_epoch", "'max_epochs'"]),
        ("gpus: 2", ["gpus", "devices"]),
        ("data: {batchsize: 2}", ["data.batchsize", "'data.batch_size'"]),
        ("strategy: {name: scaled, scal: 2}", ["strategy.scal", "'strategy.scale'"]),
        ("max_epochs: many", ["--max_epochs", "many"]),
        ("plugins: [bel]", ["'bel'", "'bell'"]),
        ("strategy: scale", ["'scale'", "'scaled'"]),
        ("- 1", ["conf.yaml", "mapping"]),
        ("max_epochs: [", ["conf.yaml"]),
    ],
)
def test_a_wrong_config_file_is_one_error(refused, write, text, words):
    write("conf.yaml", text)
    error = refused("fit net.py --config conf.yaml")
    assert all(word in error for word in words), error


BOMB = "a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text", [BOMB, "data: &all\n  batch_size: *all\n"], ids=["billion", "endless"]
)
def test_aliases_that_expand_to_too_much_are_refused_at_once(refused, write, text):
    write("conf.yaml", text)
    assert "--config conf.yaml: its aliases expand to too many values" in refused(
        "fit net.py --config conf.yaml"
    )


def test_aliases_that_expand_to_little_are_read(plan, write):
    write("conf.yaml", "max_epochs: &n 7\nlog_every_n_steps: *n\n")
    assert plan("--config conf.yaml")["options"]["log_every_n_steps"] == 7


def test_a_file_that_nests_too_deep(refused, write):
    write("conf.yaml", "[" * 2_000)
    assert "--config conf.yaml: maximum recursion" in refused("fit net.py --config conf.yaml")


def test_a_file_that_is_not_text(refused, folder):
    (folder / "conf.yaml").write_bytes(b"\xff\xfe\x00")
    assert "--config conf.yaml: " in refused("fit net.py --config conf.yaml")


@pytest.mark.parametrize("text", ["10:00:00:00", "{days: 10}"])
def test_a_time_in_a_file_is_no_number_to_the_base_60(plan, write, text):
    write("conf.yaml", f"val_check_interval: {text}\nmax_time: {text}\n")
    made = plan("--config conf.yaml")
    assert made["options"]["val_check_interval"] == "10 days, 0:00:00"
    assert "10" in made["plugins"][0]["reason"]


@pytest.mark.parametrize(("text", "read"), [("10:00:00:00", "10 days, 0:00:00"), ("0.5", 0.5)])
def test_val_check_interval_on_the_command_line(plan, text, read):
    assert plan(f"--val-check-interval {text}")["options"]["val_check_interval"] == read


def test_a_config_that_does_not_exist(refused):
    said = refused("explain net.py --config nothere.yaml")
    assert "--config nothere.yaml: there is no such file.\nFix: name" in said
    assert "Errno" not in said
