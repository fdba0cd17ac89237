"""Wrong usage: one message with a fix, exit code 2, and nothing is started."""

import pytest

#: Options after ``fit net.py`` -> words of the error.
OPTIONS = [
    # a name
    ("--strategy sngle", ["'sngle'", "'single'"]),
    ("--strategy ddp", ["'ddp'", "not installed", "pip install geartrain-ddp"]),
    ("--strategy colossalai", ["'colossalai'", "no geartrain distribution provides it"]),
    ("--strategy cpu", ["'cpu'", "--accelerator cpu"]),
    ("--accelerator mps", ["'mps'", "not installed", "pip install geartrain-mps"]),
    ("--accelerator gpu", ["'gpu'", "pip install geartrain-cuda"]),
    ("--accelerator ddp", ["is a strategy", "--strategy ddp"]),
    ("--plugin wandb", ["'wandb'", "not installed", "pip install geartrain-wandb"]),
    ("--plugin no_such.py", ["no file no_such.py"]),
    ("--plugin my_hooks.py:Step", ["'Step'", "'Steps'"]),
    ("--plugin net.py", ["net.py", "@hookimpl"]),
    ("--block nobody", ["nobody"]),
    ("--strategy single --block single", ["geartrain[single]", "blocked", "--block"]),
    # an option
    ("--max-epoch 3", ["--max_epoch.", "'max_epochs'"]),
    ("--gpus 2", ["--gpus", "devices"]),
    (
        "--trainer.max_epochs 3",
        ["--trainer.max_epochs", "no prefix", "Write: --max_epochs; in a config file"],
    ),
    ("--trainer.default_root_dir runs", ["no prefix", "Write: output=DIR"]),
    ("--trainer.callbacks+ x", ["no prefix", "--plugin NAME_OR_FILE"]),
    ("--ckpt-path last.ckpt", ["--ckpt_path", "Write: --checkpoint FILE", "--resume FILE"]),
    ("--seed_everything 3", ["--seed_everything", "Write: --seed"]),
    ("--callbacks x", ["--callbacks", "--plugin NAME_OR_FILE"]),
    ("--model.learning-rate 2", ["--model.learning_rate"]),
    ("--data.batchsize 2", ["--data.batchsize", "'data.batch_size'"]),
    ("--no-such-thing-at-all", ["--no_such_thing_at_all", "--help"]),
    ("surplus", ["surplus"]),
    # a value
    ("--max-epochs", ["--max_epochs needs a value"]),
    ("--plugin --seed 1", ["--plugin needs a value"]),
    ("--max-epochs many", ["--max_epochs: expected int or None, got 'many'"]),
    ("--model.hidden many", ["--model.hidden: expected int, got 'many'"]),
    (
        "--limit-train-batches many",
        ["--limit_train_batches: expected int or float or None, got 'many'"],
    ),
    ("--limit-train-batches 1.5", ["limit_train_batches=1.5", "fraction"]),
    ("--precision 16-mixd", ["precision='16-mixd'", "16-mixed"]),
    ("--num-nodes 0", ["num_nodes=0"]),
    # devices
    ("--devices -2", ["devices=-2"]),
    ("--devices 100000", ["devices=100000", "100000 processes", "core(s)"]),
    ("--devices 2 --strategy single", ["geartrain[single]", "one device"]),
    ("--devices 2", ["2 devices", "pip install geartrain-ddp"]),
    ("--num-nodes 2", ["2 node", "pip install geartrain-ddp"]),
]


@pytest.mark.parametrize(("words", "expected"), OPTIONS, ids=[words for words, _ in OPTIONS])
def test_options(refused, folder, words, expected):
    error = refused(f"fit net.py --output out {words}")
    assert all(word in error for word in expected), error
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("5", ["asked for 5", "[0, 1, 2, 3]", "chip"]),
        ("1,1", ["1 is given 2 times", "name each device once"]),
    ],
)
def test_devices_out_of_range(refused, devices, expected):
    error = refused(f"fit net.py --accelerator chip --strategy scaled --devices {devices}")
    assert all(word in error for word in expected), error


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fti net.py", ["'fti'", "'fit'"]),
        ("train net.py", ["'train'"]),
        ("fit", ["TARGET", "geartrain fit file.py"]),
        ("fit --max-epochs 3 net.py", ["TARGET"]),
    ],
)
def test_commands_and_targets(refused, line, expected):
    error = refused(line)
    assert all(word in error for word in expected), error


def test_nothing_at_all_shows_the_usage(command):
    done = command("")
    assert done.code == 2
    assert "usage: geartrain COMMAND TARGET" in done.out


@pytest.mark.parametrize("line", ["--help", "-h"])
def test_help(command, line):
    done = command(line)
    assert done.code == 0
    for name in ("fit", "validate", "test", "predict", "explain", "plugins"):
        assert f"  {name} " in done.out


def test_version(command):
    import geartrain

    assert command("--version").out.split() == ["geartrain", geartrain.__version__]


# --- one panel ------------------------------------------------------------------------------------


def test_traceback_shows_the_rest(command):
    done = command("fit net.py --strategy sngle --traceback")
    assert done.code == 2
    assert done.err.startswith("Traceback (most recent call last):")
    assert "in select" in done.err
    assert "\ngeartrain fit: there is no strategy 'sngle'" in done.err


def test_the_fix_is_on_a_separate_line(refused):
    assert (
        refused("fit net.py --strategy ddp")
        == "geartrain fit: strategy 'ddp' is not installed.\nFix: pip install geartrain-ddp\n"
    )


def test_control_characters_of_an_argument_do_not_reach_the_terminal(refused):
    error = refused("fit net.py --strategy 'a\x1b[31mb'")
    assert "\x1b" not in error


def test_a_required_option_is_named_with_its_dashes(refused, folder):
    (folder / "required.py").write_text(
        "import geartrain as gt\n"
        "class Net(gt.Module):\n"
        "    def __init__(self, width: int, depth: int): super().__init__()\n"
        "    def training_step(self, batch, batch_idx): pass\n"
        "    def configure_optimizers(self): pass\n"
    )
    error = refused("fit required.py")
    assert "--model.width, --model.depth: a value is required.\nFix: --model.width VALUE" in error
