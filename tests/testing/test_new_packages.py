"""Packages that ``geartrain new`` writes: built as wheels, installed, and tested by their tests.

The strategy's tests are the conformance kit.
"""

import re
from types import SimpleNamespace

import pytest

from ..tools.sites import ROOT, build, environment

#: Kind -> a name.
NAMES = {
    "strategy": "tandem",
    "accelerator": "my-chip",
    "plugin": "grad_norm",
    "logger": "my-log",
    "precision": "bf16-mine",
    "command": "retell",
}
#: Kind -> pytest's arguments that leave out tests. :mod:`geartrain.parallel` starts and watches the
#: strategy's ranks, and ddp's tests make these fail in every phase and by every signal. Here one
#: error, one killed rank and one stopped rank are enough.
LEFT_OUT = {
    "strategy": (
        "-k",
        "not (configure_optimizers or validation_step or on_train_end or test_step"
        " or SIGSEGV or SIGTERM)",
    )
}
#: Seconds for the strategy's conformance run on a busy machine.
DEADLINE = 400

pytestmark = [pytest.mark.build, pytest.mark.timeout(DEADLINE + 60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a written package of each kind, and an environment with their wheels."""
    folder = tmp_path_factory.mktemp("new")
    wheels = build(tmp_path_factory.mktemp("core"), [ROOT / "core", ROOT / "plugins/tools/cli"])
    writer = environment(tmp_path_factory.mktemp("writer"), wheels)
    for kind, name in NAMES.items():
        # With installed wheels, not the sources: the templates must be in the wheel.
        done = writer.geartrain("new", kind, name, "--output", f"written-{kind}", cwd=folder)
        assert done.returncode == 0, done.stderr
    built = build(tmp_path_factory.mktemp("wheels"), [folder / f"written-{kind}" for kind in NAMES])
    return SimpleNamespace(
        folder=folder, site=environment(tmp_path_factory.mktemp("site"), [*wheels, *built])
    )


@pytest.mark.parametrize("kind", NAMES)
def test_its_own_tests_pass(place, kind):
    """Its own tests pass with installed wheels; only those of capabilities are skipped."""
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
    supported = ("unused_parameters", "weighted_loss")
    limits = [f"{name} is supported; test_equals_one_process tests it" for name in supported]
    extras = ["recovers is not declared"]
    extras.append("ranks_option is None: each device has a fixed number of ranks")
    assert skipped == ([*extras, *limits] if kind == "strategy" else []), done.stdout
