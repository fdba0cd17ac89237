"""Wheels of core, geartrain-cli, geartrain-parallel and tests/packages/*, installed by pip."""

import json
from pathlib import Path

import pytest

from ..tools.sites import PACKAGES, ROOT, build, environment

TARGET = Path(__file__).with_name("downhill.py")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Build the wheels with the installed ``hatchling``, once per session."""
    folder = tmp_path_factory.mktemp("wheels")
    # geartrain-wrong belongs to the tests of the conformance kit; these tests do not need it.
    sources = [
        path.parent
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
        if path.parent.name != "geartrain-wrong"
    ]
    plugins = [ROOT / "plugins/tools/cli", ROOT / "plugins/strategies/parallel"]
    return build(folder, [ROOT / "core", *plugins, *sources])


@pytest.fixture(scope="session")
def site(wheels, tmp_path_factory):
    """A new environment with all wheels."""
    return environment(tmp_path_factory.mktemp("site"), wheels)


@pytest.fixture
def geartrain(site, tmp_path):
    """Return a function: ``geartrain("plugins")`` runs the command in the test's folder."""

    def run(*arguments, **env):
        return site.geartrain(*arguments, cwd=tmp_path, **env)

    return run


@pytest.fixture
def fit(geartrain, tmp_path):
    """Return a function: ``fit("--strategy", "polite")`` trains :mod:`downhill` for one epoch.

    An epoch has four steps. The function returns the run's output and files.
    """

    def run(*arguments, **env):
        done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *arguments, **env)
        assert done.returncode == 0, done.stderr
        return Outcome(tmp_path / "out", done.stdout + done.stderr)

    return run


@pytest.fixture
def refused(geartrain, tmp_path):
    """Return a function that runs a wrong command: ``refused("--strategy", "broken_import")``.

    It returns the single error, raised before anything was started.
    """

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
    """The output and the folder of a run."""

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
        """Return the last line of metrics.jsonl."""
        return json.loads((self._folder / "metrics.jsonl").read_text().splitlines()[-1])
