"""``StrategyConformance``: the tests that every strategy must pass, as a class to subclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from geartrain import UsageError
from geartrain_testing.capabilities import Capabilities
from geartrain_testing.cases import Cases
from geartrain_testing.cases_failures import FailureCases
from geartrain_testing.cases_launch import LaunchCases
from geartrain_testing.cases_training import TrainingCases, uses
from geartrain_testing.kit import RANKS, THREE, Kit, Programs

#: Scenario -> the cases that also run on three ranks.
ON_THREE = {
    "every_step": ("every_step", "unequal_batches", "dtypes"),
    "start_apart": ("start", "ranks_that_start_apart"),
    "collectives": ("all_gather", "broadcast"),
    "metrics": ("metrics", "weighted_means"),
    "evaluation_coverage": ("evaluation_coverage",),
}


class StrategyConformance(TrainingCases, Cases, LaunchCases, FailureCases):
    """The tests of one strategy. Subclass it, name the strategy, and run pytest::

        class TestMine(StrategyConformance):
            strategy = "mine"

    Each test is about a scenario that a real program ran, with the strategy chosen by its entry
    point's name. One program runs the scenarios of all chosen tests, one after another. A scenario
    that must fail has its own program.
    """

    #: The entry point's name.
    strategy: str
    #: Options of the strategy.
    options: Mapping[str, Any] = {}
    #: The number of devices to run on.
    devices: int = 2
    #: The features that the strategy supports; ``None``: its attribute ``capabilities``.
    capabilities: Capabilities | None = None
    accelerator: str = "cpu"
    #: An optimizer that the strategy needs: ``{"class": "package:Name", "lr": 0.1, ...}``. Every
    #: case but ``scheduler`` trains with it. One process keeps torch's, so declare ``convergence``.
    optimizer: Mapping[str, Any] = {}
    #: Seconds that one scenario may take, and seconds in which a failed program must end.
    deadline: float = 60.0
    #: The strategy's timeout for a stopped rank, in seconds. Ranks must be able to start within it.
    timeout: float = 20.0

    #: Classes with the same name run their shared scenarios in one program, one class after
    #: another. Their ranks must start in the same way. Leftovers of the program are a failure of
    #: each class.
    program: str = ""

    @pytest.mark.parametrize("scenario", ON_THREE)
    @uses(start=THREE)
    def test_three_devices(self, kit: Kit, scenario: str) -> None:
        """Cases that two ranks may pass by chance pass on three ranks too."""
        three = kit.on_three()
        if three is None:
            pytest.skip("the other cases do not run on two devices, or three are refused")
        for case in ON_THREE[scenario]:
            if check := getattr(self, f"test_{case}", None):
                check(three)

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
        """The strategy's kit, with the scenarios of the chosen tests."""
        suite = request.cls
        kits = request.config.stash.setdefault(_KITS, {})
        if suite not in kits:
            wanted, together = _wanted(request.session.items), [suite]
            if suite.program:
                together = [other for other in wanted if other.program == suite.program]
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
                except UsageError:  # another class's error fails in that class
                    if each is suite:
                        raise
        return kits[suite]


_KITS = pytest.StashKey[dict[type[StrategyConformance], Kit]]()


def _wanted(items: Iterable[Any]) -> dict[Any, dict[str, list[str]]]:
    """Return the chosen tests' shared scenarios: class -> how they start -> names in order."""
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
