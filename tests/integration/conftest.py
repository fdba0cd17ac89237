"""Wheels of tests/packages/*, of core, geartrain-cli and geartrain-parallel, built and installed for real, once a session."""

import json
from pathlib import Path

import pytest

from ..sites import PACKAGES, ROOT, build, environment

TARGET = Path(__file__).with_name("downhill.py")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Wheels of core, geartrain-cli, geartrain-parallel and each of tests/packages/*, built by the ``hatchling`` that is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    # geartrain-wrong is the conformance kit's: forty strategies that nobody here asks for.
    sources = [
        path.parent
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
        if path.parent.name != "geartrain-wrong"
    ]
    return build(
        folder, [ROOT / "core", ROOT / "plugins" / "cli", ROOT / "plugins" / "parallel", *sources]
    )


@pytest.fixture(scope="session")
def site(wheels, tmp_path_factory):
    """A fresh environment with all of the wheels."""
    return environment(tmp_path_factory.mktemp("site"), wheels)


@pytest.fixture
def geartrain(site, tmp_path):
    """``geartrain("plugins")``: run the command in a folder of the test's own."""

    def run(*arguments, **env):
        return site.geartrain(*arguments, cwd=tmp_path, **env)

    return run


@pytest.fixture
def fit(geartrain, tmp_path):
    """``fit("--strategy", "polite")``: train :mod:`downhill` for one epoch, its four steps; what the run left behind."""

    def run(*arguments, **env):
        done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *arguments, **env)
        assert done.returncode == 0, done.stderr
        return Outcome(tmp_path / "out", done.stdout + done.stderr)

    return run


@pytest.fixture
def refused(geartrain, tmp_path):
    """``refused("--strategy", "broken_import")``: the one error of a run that was refused before anything was started."""

    def run(*arguments, **env):
        done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *arguments, **env)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("geartrain fit: ") == 1
        assert "the module is made" not in done.stdout
        assert not (tmp_path / "out").exists()
        return done.stderr

    return run


class Outcome:
    """What a run printed and left in its folder."""

    def __init__(self, folder, printed):
        self.printed = printed
        self._folder = folder

    @property
    def weights(self):
        import torch

        return torch.load(self._folder / "last.ckpt", weights_only=True)["model"]["w"].tolist()

    @property
    def plan(self):
        return json.loads((self._folder / "plan.json").read_text())

    @property
    def metrics(self):
        """The last line of metrics.jsonl."""
        return json.loads((self._folder / "metrics.jsonl").read_text().splitlines()[-1])
