"""Mistakes of users on the command line: each gets one message with a fix, or is accepted."""

import pytest

from geartrain import Trainer

TOP = """\
from net import Data, Net
import geartrain as gt
class Mine(Net): ...
{0}
open("after", "w").close()
"""
FIT = "gt.Trainer(max_epochs=1, accelerator='cpu').fit(Mine(), datamodule=Data())"
FILES = {
    "twice.yaml": "max_epochs: 1\nmodel: {lr: 0.1}\nmax_epochs: 2\n",
    "inside.yaml": "model:\n  lr: 0.1\n  lr: 0.2\n",
    "list.yaml": "- 1\n",
    "epochs.yaml": "epochs: 3\n",
    "section.yaml": "trainer: {max_epochs: 3}\n",
    "syntax.yaml": "max_epochs: [1\n",
    "a.yaml": "max_epochs: 1\nmodel: {lr: 0.5}\nseed: 1\n",
    "b.yaml": "model: {hidden: 5}\nseed: 2\n",
    "comments.yaml": "# max_epochs: 3\n",
    "top.py": TOP.format(FIT),
    "cli.py": TOP.format("gt.cli(Mine, Data)"),
    "two.py": "from net import Net\nclass A(Net): ...\nclass B(Net): ...\n",
    "none.py": "import torch\n",
    "syntax.py": "def f(:\n",
    "imports.py": "import no_such_module\n",
}

#: A command line -> words of its answer.
REFUSED = [
    # the command and TARGET
    ("train net.py", ["no command 'train'. Did you mean 'fit'?"]),
    ("eval net.py", ["Did you mean 'validate'?"]),
    ("net.py", ["Fix: geartrain fit net.py"]),
    ("fit", ["geartrain fit file.py [options]"]),
    ("fit nett.py", ["Did you mean 'net.py'?"]),
    ("fit net.py:Nett", ["Did you mean 'Net'?"]),
    ("fit two.py", ["Fix: name one: two.py:A or two.py:B"]),
    ("fit none.py", ["Fix: class None(geartrain.Module)"]),
    ("fit syntax.py", ["syntax.py:1: def f("]),
    ("fit imports.py", ["imports.py:1: import no_such_module"]),
    ("fit cli.py", ["cli.py starts a run when it is imported.", "Fix: put it under if __name__"]),
    # options
    ("fit net.py --epochs 3", ["Did you mean --max-epochs?"]),
    ("fit net.py --steps 3", ["Did you mean --max-steps?"]),
    ("fit net.py --gpus 2", ["devices=N with accelerator='gpu'", "strategy='dp'"]),
    ("fit net.py --cpu", ["Did you mean --accelerator cpu?"]),
    ("fit net.py --device cpu", ["--accelerator NAME or --devices COUNT"]),
    ("fit net.py --hidden 3", ["Did you mean --model.hidden?"]),
    ("fit net.py --batch-size 3", ["Did you mean --data.batch_size?"]),
    ("fit net.py --no-enable-progress-bar", ["Fix: --enable_progress_bar false"]),
    ("test net.py --resume", ["no option --resume of geartrain test", "Fix: leave it out"]),
    ("fit net.py --nonsense", ["Fix: one of those that geartrain fit TARGET --help lists"]),
    ("fit net.py max_epochs=1", ["Fix: --max_epochs 1"]),
    ("fit net.py --config a.yaml b.yaml", ["Fix: --config b.yaml"]),
    ("fit net.py --accelerator gpus", ["Did you mean 'gpu'?"]),
    ("fit net.py --plugin dpp", ["--strategy ddp"]),
    ("fit net.py --plugin early_stoping", ["Did you mean 'early_stopping'?"]),
    ("fit net.py --max-epochs 3.5", ["--max_epochs: expected int or None, got '3.5'"]),
    # config files
    ("fit net.py --config twice.yaml", ["line 3 has the key 'max_epochs'", "Fix: remove one"]),
    ("fit net.py --config inside.yaml", ["line 3 has the key 'lr'", "Fix: remove one"]),
    ("fit net.py --config list.yaml", ["a mapping of options", "Fix: lines such as"]),
    ("fit net.py --config epochs.yaml", ["Did you mean --max-epochs?"]),
    ("fit net.py --config section.yaml", ["max_epochs without the section trainer"]),
    ("fit net.py --config syntax.yaml", ["expected ',' or ']'"]),
    ("fit net.py --config missing.yaml", ["Fix: name a YAML file of options"]),
]


@pytest.fixture(autouse=True)
def files(write):
    for name, text in FILES.items():
        write(name, text)


@pytest.mark.parametrize(("line", "expected"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_mistake_gets_one_message_with_a_fix(refused, folder, line, expected):
    error = refused(line)
    assert all(words in error for words in expected), error
    assert not (folder / "after").exists()
    assert not Trainer.refusal


def test_several_config_files_merge_and_later_ones_win(plan):
    options = plan("--config a.yaml --config b.yaml")["options"]
    assert (options["max_epochs"], options["seed"]) == (1, 2)


def test_a_config_file_of_comments_alone_is_accepted(plan):
    assert plan("--config comments.yaml --max-epochs 7")["options"]["max_epochs"] == 7


BROKEN = (
    "from net import Data as Base, Net\nclass Mine(Net):\n"
    "    def training_step(self, batch, batch_idx): return 1 / 0\n"
    "class Data(Base): ...\n"
)


def test_an_error_of_a_step_is_one_message_with_the_users_line(command, write):
    write("broken.py", BROKEN)
    done = command("fit broken.py -q --max-epochs 1 --num-sanity-val-steps 0")
    assert done.code == 1
    assert done.err == (
        "geartrain fit: ZeroDivisionError: division by zero\n"
        "  broken.py:3: def training_step(self, batch, batch_idx): return 1 / 0\n"
        "The whole traceback: --traceback\n"
    )


def test_with_traceback_it_is_raised(command, write):
    write("broken.py", BROKEN)
    with pytest.raises(ZeroDivisionError):
        command("fit broken.py -q --max-epochs 1 --traceback")


def test_a_target_that_trains_when_it_is_imported_is_refused(command, folder):
    done = command("fit top.py")
    assert done.code == 2
    assert "top.py starts a run when it is imported.\n  top.py:4: " in done.err
    assert "\nFix: put it under if __name__" in done.err
    assert not (folder / "after").exists()
