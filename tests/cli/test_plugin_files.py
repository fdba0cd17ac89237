"""One-file plugins: ``--plugin my_hooks.py`` and ``--plugin my_hooks.py:Class``."""

import sys

import pytest
from small_models import fit

from geartrain import UsageError
from geartrain_cli.plugin_files import file_plugin, load_file

FUNCTIONS = """
from geartrain import hookimpl
@hookimpl
def on_step_end(run): ...
"""
ONE = """
from geartrain import hookimpl
class Plain: ...
class {name}:
    @hookimpl
    def on_step_end(self, run): ...
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file; modules from its folder are removed after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(source, name="my_hooks_file.py"):
        (tmp_path / name).write_text(source)
        return tmp_path / name

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def refused(spec, *words):
    with pytest.raises(UsageError) as caught:
        file_plugin(str(spec))
    for word in words:
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["acme.py-plugin", "py"])
def test_a_name_is_no_file(name):
    assert file_plugin(name) is None


def test_class_whose_hookimpls_are_all_static_is_a_plugin(write):
    path = write(
        "from geartrain import hookimpl\nclass Mine:\n"
        "    @staticmethod\n    @hookimpl\n    def on_step_end(run): ...\n"
    )
    assert file_plugin(str(path))[1].__name__ == "Mine"


def test_class_that_inherits_its_hookimpls_is_a_plugin(write):
    write(ONE.format(name="Base"), "my_hooks_base.py")
    path = write("from my_hooks_base import Base\nclass Mine(Base): ...\n")
    assert file_plugin(str(path))[1].__name__ == "Mine"


def test_a_callback_in_a_file_is_a_plugin(write, capsys):
    path = write(
        "from geartrain.callbacks import Callback\nclass Mine(Callback):\n"
        "    def on_train_epoch_end(self, trainer, pl_module): print('an epoch is done')\n"
    )
    fit(plugins=[str(path)])
    assert capsys.readouterr().out == "an epoch is done\n"


def test_named_class_is_chosen_among_several(write):
    path = write(ONE.format(name="One") + ONE.format(name="Two"))
    assert file_plugin(f"{path}:Two")[0] == "Two"
    assert file_plugin(f"{path}:Two")[1].__name__ == "Two"
    refused(path, "several", f"{path}:One", f"{path}:Two")
    refused(f"{path}:Tow", "'Tow'", "Did you mean 'Two'?")
    refused(f"{path}:Plain", "'Plain'", "One, Two")


def test_functions_and_classes_together_need_a_name(write):
    path = write(FUNCTIONS + ONE.format(name="One"))
    refused(path, f"{path}:One")
    assert file_plugin(f"{path}:One")[1].__name__ == "One"


def test_file_without_hookimpls_is_an_error_with_the_fix(write):
    refused(write("def on_step_end(run): ..."), "nothing marked", "from geartrain import hookimpl")


def test_missing_file_gets_the_nearest_one_beside_it(write, tmp_path):
    write(FUNCTIONS, "my_hooks_file.py")
    (tmp_path / "folder.py").mkdir()
    refused(tmp_path / "my_hook_file.py", "my_hook_file.py", "Did you mean 'my_hooks_file.py'?")
    refused(tmp_path / "folder.py", "no file")
    refused(tmp_path / "nowhere" / "a.py", "no file")


@pytest.mark.parametrize(
    ("source", "word"),
    [("def (", "SyntaxError"), ("raise SystemExit('bye')", "bye")],
)
def test_file_that_raises_names_file_and_cause_and_leaves_nothing_behind(write, source, word):
    path = write(source)
    error = refused(path, str(path), word)
    assert error.__cause__ is not None
    assert "my_hooks_file" not in sys.modules
    write(FUNCTIONS)
    assert file_plugin(str(path))[0] == "my_hooks_file"


def test_file_may_import_modules_in_its_folder(write):
    write("answer = 42", "my_hooks_helper.py")
    assert load_file(write("from my_hooks_helper import answer")).answer == 42


def test_file_is_imported_once(write):
    path = write(FUNCTIONS)
    assert load_file(path) is load_file(path)


def test_file_named_like_a_loaded_module_is_refused_and_the_module_stays(write):
    path = write(FUNCTIONS, "json.py")
    refused(path, "json", "rename")
    assert "loads" in vars(sys.modules["json"])
