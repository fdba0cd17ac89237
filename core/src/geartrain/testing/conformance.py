"""``StrategyConformance``: what every strategy must do, as a class of tests to subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from geartrain.testing.capabilities import Capabilities
from geartrain.testing.cases import Cases
from geartrain.testing.cases_failures import FailureCases
from geartrain.testing.cases_launch import LaunchCases
from geartrain.testing.cases_training import TrainingCases
from geartrain.testing.kit import Kit


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

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
        """The strategy's kit, which knows the scenarios of the tests that were chosen."""
        suite = request.cls
        wanted: dict[str, None] = {}
        for item in request.session.items:
            if getattr(item, "cls", None) is suite:
                wanted.update(dict.fromkeys(_scenarios(item)))
        return Kit(suite, tmp_path_factory.mktemp(f"conformance-{suite.strategy}"), list(wanted))


def _scenarios(item: Any) -> tuple[str, ...]:
    """The shared scenarios that a test is about."""
    given = getattr(getattr(item, "callspec", None), "params", {}).get("scenario")
    return (given,) if given else getattr(item.function, "scenarios", ())
