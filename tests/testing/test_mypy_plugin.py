"""mypy with the plugin, on the file of an author."""

import pytest
from mypy import api

CONFIG = """
[mypy]
strict = true
plugins = geartrain_testing.mypy_plugin
[mypy-torch.*,numpy.*,IPython.*,matplotlib.*,rich.*,PIL.*,filelock.*]
follow_imports = skip
[mypy-geartrain.*]
disable_error_code = misc, no-any-return, unused-ignore, empty-body, no-untyped-call
"""

PLUGIN = """
from collections.abc import Generator
from geartrain import Run, hookimpl

class Right:
    @hookimpl
    def on_run_start(self) -> None: ...
    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Generator[None, None, None]:
        run.hooks.barrier(run=run)
        run.hooks.on_stall(run=run, epochs=3)  # another plugin's hook
        yield
    @hookimpl(specname="on_step_end")
    def count(self, run: Run) -> None: ...
    @hookimpl
    def on_stall(self, epochs: int) -> None: ...
    @staticmethod
    @hookimpl
    def on_epoch_end(run: Run) -> None: ...

class Wrong:
    @hookimpl
    def on_setp_end(self, run: Run) -> None: ...
    @hookimpl(wrapper=True)
    def clip_gradients(self, rn: Run) -> Generator[None, None, None]:
        run: Run = rn
        run.hooks.broadcast(run=run, object=1, src=0)
        yield
    @hookimpl
    def on_run_end(self, run: int) -> None: ...
    @hookimpl
    def barrier(self, run: Run) -> int:
        return 1

@hookimpl
def forward(run: Run, methods: str) -> None: ...
"""

MESSAGES = [
    '"on_setp_end" is no hook; did you mean "on_step_end"?',
    'Hook "clip_gradients" has no argument "rn"; it has "run"',
    'Unexpected keyword argument "object"',
    'Argument "run" of hook "on_run_end" is "Run", not "int"',
    'Hook "barrier" returns "None", not "int"',
    'Hook "forward" has no argument "methods"; it has "run", "method", "args"',
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "author.py").write_text(PLUGIN)
    arguments = ["--config-file", folder / "mypy.ini", "--cache-dir", folder / "cache"]
    output, crash, _ = api.run([str(x) for x in [*arguments, folder / "author.py"]])
    assert not crash
    return [line for line in output.splitlines() if "error:" in line]


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_of_the_author(errors, message):
    assert sum(message in error for error in errors) == 1


def test_nothing_else_is_reported(errors):
    assert len(errors) == len(MESSAGES), errors
    first_wrong = PLUGIN[: PLUGIN.index("class Wrong")].count("\n") + 1
    assert all(int(error.split(":")[1]) > first_wrong for error in errors)
