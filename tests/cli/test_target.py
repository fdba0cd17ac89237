"""TARGET: the class and the file that a command runs."""

import sys

import pytest

from geartrain_cli.target import find_target

SUBCLASS = "from net import Net\nclass {0}(Net): ...\n"


def names(target):
    model, data = find_target(target)
    return model.__name__, data and data.__name__


# --- found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["net.py", "net.py:Net", "./net.py", "net", "net:Net"])
def test_a_file_or_a_module_of_the_working_directory(target):
    assert names(target) == ("Net", "Data")


def test_a_file_elsewhere(folder, write):
    write(
        "deep/down/other.py",
        "import geartrain as gt\nclass Other(gt.Module): ...\n"
        "class OtherData(gt.DataModule): ...\n",
    )
    assert names(str(folder / "deep" / "down" / "other.py:Other")) == ("Other", "OtherData")


@pytest.mark.parametrize("target", ["package.nets:Net", "package.nets", "package/nets.py"])
def test_a_module_of_a_package(folder, write, target):
    write("package/__init__.py", "")
    write("package/nets.py", (folder / "net.py").read_text())
    assert names(target) == ("Net", "Data")


def test_a_file_imports_modules_beside_it(write):
    write("deep/sizes.py", "WIDTH = 5\n")
    write(
        "deep/wide.py",
        "import geartrain as gt\nfrom sizes import WIDTH\nclass Wide(gt.Module):\n"
        "    width = WIDTH\n",
    )
    assert find_target("deep/wide.py")[0].width == 5


def test_imported_classes_do_not_count(write):
    """A file may import a module to subclass it."""
    write("mine.py", "from net import Data, Net\nclass Mine(Net): ...\n")
    assert names("mine.py") == ("Mine", None)


def test_but_an_imported_class_can_be_named(write):
    write("mine.py", "from net import Data, Net\nclass Mine(Net): ...\n")
    assert names("mine.py:Net") == ("Net", None)


def test_of_a_chain_of_subclasses_the_last_is_selected(write):
    write(
        "chain.py",
        "from net import Data, Net\nclass A(Net): ...\nclass B(A): ...\nclass C(B): ...\n"
        "class D1(Data): ...\nclass D2(D1): ...\n",
    )
    assert names("chain.py") == ("C", "D2")
    assert names("chain.py:A") == ("A", "D2")


def test_a_name_for_the_same_class_is_not_a_second_one(write):
    write("alias.py", SUBCLASS.format("Mine") + "Model = Mine\n")
    assert names("alias.py") == ("Mine", None)


def test_the_file_runs_once_and_not_as_a_script(write, capsys):
    write("loud.py", SUBCLASS.format("Mine") + "print('imported as', __name__)\n")
    assert find_target("loud.py") == find_target("loud.py:Mine")
    assert capsys.readouterr().out == "imported as loud\n"


def test_classes_of_the_file_can_be_pickled(write):
    """DataLoader workers and spawned processes need this."""
    import pickle

    write("mine.py", SUBCLASS.format("Mine"))
    model, _ = find_target("mine.py")
    assert pickle.loads(pickle.dumps(model)) is model


# --- not found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nett.py", ["no file nett.py", "'net.py'"]),
        ("deep/net.py", ["no file deep/net.py"]),
        ("net.py:Nett", ["net.py", "'Nett'", "'Net'"]),
        ("net.py:Data", ["net.py", "no Module 'Data'"]),
        ("net.py:torch", ["no Module 'torch'"]),
        ("no_such_module:Net", ["'no_such_module'", "could not be imported"]),
        (".", ["not a Python file"]),
        ("net.txt", ["'net"]),
    ],
)
def test_nothing_there(refused, target, words):
    error = refused(f"fit {target}")
    assert all(word in error for word in words), error


def test_no_module_in_it(refused, write):
    write("empty.py", "import torch\nclass Net(torch.nn.Module): ...\n")
    error = refused("fit empty.py")
    assert "empty.py has no subclass of geartrain.Module" in error


def test_several_modules_in_it(refused, write):
    write("both.py", SUBCLASS.format("A") + SUBCLASS.format("B"))
    error = refused("fit both.py")
    assert "both.py:A" in error
    assert "both.py:B" in error
    assert names("both.py:B") == ("B", None)


def test_several_data_modules_in_it(refused, write):
    write(
        "both.py",
        "from net import Data, Net\nclass Mine(Net): ...\nclass A(Data): ...\nclass B(Data): ...\n",
    )
    assert "several DataModules (A, B)" in refused("fit both.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nno_such_name\n", ["NameError", "'no_such_name'"]),
        ("x = = 1\n", ["SyntaxError", "line 1"]),
        ("import no_such_module\n", ["ModuleNotFoundError", "'no_such_module'"]),
        ("raise SystemExit(3)\n", ["SystemExit"]),
    ],
)
def test_a_file_that_fails_on_import(refused, write, text, words):
    write("bad.py", text)
    error = refused("fit bad.py")
    assert all(word in error for word in ["bad.py could not be imported", *words]), error


HELPER = """\
def load():
    try:
        import no_such_module
    except ImportError as error:
        raise RuntimeError("no data") from error
"""


@pytest.mark.parametrize("target", ["bad.py", "bad", "bad:Net"])
def test_an_error_inside_an_import_shows_the_users_lines_and_the_cause(refused, write, target):
    write("helper.py", HELPER)
    write("bad.py", "import helper\nhelper.load()\n")
    error = refused(f"fit {target}")
    assert (
        "RuntimeError: no data, because of ModuleNotFoundError: No module named 'no_such_module'"
        in error
    )
    assert '  helper.py:5: raise RuntimeError("no data") from error\n' in error
    assert "  helper.py:3: import no_such_module\n" in error
    assert "importlib" not in error


@pytest.mark.parametrize("target", ["bad.py", "bad"])
def test_a_syntax_error_shows_its_line(refused, write, target):
    write("bad.py", "import torch\nx = = 1\n")
    assert "  bad.py:2: x = = 1\n" in refused(f"fit {target}")


def test_a_file_with_the_name_of_a_loaded_module(refused, write):
    """``import`` would return the loaded module."""
    write("deep/net.py", SUBCLASS.format("Mine"))
    find_target("net.py")
    error = refused("fit deep/net.py")
    assert "rename" in error
    assert "'net'" in error
    write("json.py", SUBCLASS.format("Mine"))
    assert "'json'" in refused("fit json.py")


def test_a_file_that_failed_leaves_nothing_behind(refused, write):
    write("bad.py", "no_such_name\n")
    refused("fit bad.py")
    assert "bad" not in sys.modules


# --- incomplete targets ---------------------------------------------------------------------------

BARE = """
import geartrain as gt
class Bare(gt.Module):
    {0}
"""


@pytest.mark.parametrize(
    ("body", "verb", "words"),
    [
        ("...", "fit", ["Bare", "training_step"]),
        (
            "def train_step(self, batch, batch_idx): ...",
            "fit",
            ["Bare", "train_step", "Did you mean 'training_step'"],
        ),
        ("def training_step(self, batch): ...", "fit", ["Bare", "configure_optimizers"]),
        ("...", "validate", ["Bare", "validation_step"]),
        ("...", "test", ["Bare", "test_step"]),
        ("...", "predict", ["Bare", "predict_step"]),
        (
            "def log_grad_norm(self, norms): ...\n    training_step = configure_optimizers = print",
            "fit",
            ["Bare.log_grad_norm", "never be called"],
        ),
    ],
)
def test_a_module_without_the_methods_the_command_needs(refused, write, body, verb, words):
    write("bare.py", BARE.format(body))
    error = refused(f"{verb} bare.py")
    assert all(word in error for word in words), error


WIDE = """
from net import Data as Base, Net

class Wide(Net):
    def __init__(self, width: int):
        super().__init__(width)

class Data(Base): ...
"""


def test_options_that_have_no_default_must_be_given(refused, command, write):
    write("wide.py", WIDE)
    assert "model.width" in refused("fit wide.py")
    assert command("fit wide.py --model.width 3 --fast-dev-run").code == 0
