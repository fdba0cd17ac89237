"""What ``geartrain new`` writes works at once: built as wheels, installed, and tested by its own tests. For the strategy these are the
conformance kit's."""

import re
from types import SimpleNamespace

import pytest

from ..sites import ROOT, build, environment

#: kind -> a name.
NAMES = {"strategy": "tandem", "accelerator": "my-chip", "plugin": "grad_norm", "command": "retell"}
#: kind -> which of them are left out. The strategy's ranks are started and watched by :mod:`geartrain.parallel`, as ddp's are, which fails
#: in every phase and by every signal; here one error, a killed rank and a stopped one show that what was written is watched at all.
LEFT_OUT = {
    "strategy": (
        "-k",
        "not (configure_optimizers or validation_step or on_train_end or test_step or SIGSEGV or SIGTERM)",
    )
}
#: Seconds for the strategy's conformance run, on a machine that does other things as well.
DEADLINE = 400

pytestmark = [pytest.mark.build, pytest.mark.timeout(DEADLINE + 60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Core's wheel wrote a package of each kind; an environment with their wheels and core's, and the folder they are in."""
    folder = tmp_path_factory.mktemp("new")
    wheels = build(tmp_path_factory.mktemp("core"), [ROOT / "core", ROOT / "plugins" / "cli"])
    writer = environment(tmp_path_factory.mktemp("writer"), wheels)
    for kind, name in NAMES.items():
        # In what core's wheel installed, not in the sources: the templates must be in the wheel.
        done = writer.geartrain("new", kind, name, "--output", f"written-{kind}", cwd=folder)
        assert done.returncode == 0, done.stderr
    built = build(tmp_path_factory.mktemp("wheels"), [folder / f"written-{kind}" for kind in NAMES])
    return SimpleNamespace(
        folder=folder, site=environment(tmp_path_factory.mktemp("site"), [*wheels, *built])
    )


@pytest.mark.parametrize("kind", NAMES)
def test_its_own_tests_pass(place, kind):
    """The package's own tests, against what was installed; none is skipped but the one for strategies with a limit."""
    options = (
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "--basetemp",
        f"files-{kind}",
        *LEFT_OUT.get(kind, ()),
    )
    done = place.site.run(
        place.site.python,
        "-m",
        "pytest",
        *options,
        f"written-{kind}",
        cwd=place.folder,
        seconds=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout
    skipped = re.findall(r"^SKIPPED \[1\] .*?: (.*)", done.stdout, re.M)
    limits = ["unused_parameters is supported; test_equals_one_process is about it"]
    assert skipped == (limits if kind == "strategy" else []), done.stdout
