"""``StrategyConformance``: what every strategy must do, as a class of tests to subclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from geartrain import UsageError
from geartrain_testing.capabilities import Capabilities
from geartrain_testing.cases import Cases
from geartrain_testing.cases_failures import FailureCases
from geartrain_testing.cases_launch import LaunchCases
from geartrain_testing.cases_training import TrainingCases
from geartrain_testing.kit import RANKS, Kit, Programs


class StrategyConformance(TrainingCases, Cases, LaunchCases, FailureCases):
    """The tests of one strategy. Subclass it, say which, and run pytest::

        class TestMine(StrategyConformance):
            strategy = "mine"

    Each test is about a scenario that a real program ran, with the strategy chosen by its entry point's name. The scenarios of a
    class's chosen tests run one after another in one program; those in which something must fail have programs of their own.
    """

    #: The entry point's name.
    strategy: str
    #: Options of the strategy.
    options: Mapping[str, Any] = {}
    #: How many devices to run on.
    devices: int = 2
    #: What the strategy supports; where it is ``None``, the strategy's own attribute ``capabilities`` says so.
    capabilities: Capabilities | None = None
    accelerator: str = "cpu"
    #: For a strategy that needs an optimizer of its own: ``{"class": "package:Name", "lr": 0.1, ...}``, used in every case but
    #: ``scheduler``. One process, which ranks are compared with, keeps torch's own: declare ``convergence``.
    optimizer: Mapping[str, Any] = {}
    #: Seconds that one scenario may take, and that a failed program has until it must have ended.
    deadline: float = 60.0
    #: Seconds given as the strategy's timeout where a rank is stopped; long enough for ranks to start in.
    timeout: float = 20.0

    #: Classes that give the same name run their shared scenarios in one program, one class after another. Their ranks must be started
    #: alike; what such a program leaves behind is a failure of each class.
    program: str = ""

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
        """The strategy's kit, which knows the scenarios of the tests that were chosen."""
        suite = request.cls
        kits = request.config.stash.setdefault(_KITS, {})
        if suite not in kits:
            wanted = _wanted(request.session.items)
            together = (
                [other for other in wanted if other.program == suite.program]
                if suite.program
                else [suite]
            )
            programs = Programs(
                tmp_path_factory.mktemp(f"conformance-{suite.program or suite.strategy}")
            )
            for each in together:
                folder = (
                    programs.folder
                    if each is suite
                    else tmp_path_factory.mktemp(f"conformance-{each.strategy}")
                )
                try:
                    kits[each] = Kit(each, folder, wanted[each], programs)
                except UsageError:  # another class's failure
                    if each is suite:
                        raise
        return kits[suite]


_KITS = pytest.StashKey[dict[type[StrategyConformance], Kit]]()


def _wanted(items: Iterable[Any]) -> dict[Any, dict[str, list[str]]]:
    """Return the shared scenarios that each class's chosen tests are about, in order, by how their programs are started."""
    wanted: dict[Any, dict[str, list[str]]] = {}
    for item in items:
        suite = getattr(item, "cls", None)
        if isinstance(suite, type) and issubclass(suite, StrategyConformance):
            given = getattr(getattr(item, "callspec", None), "params", {}).get("scenario")
            names = (given,) if given else getattr(item.function, "scenarios", ())
            known = wanted.setdefault(suite, {}).setdefault(
                getattr(item.function, "start", RANKS), []
            )
            known += [name for name in names if name not in known]
    return wanted
