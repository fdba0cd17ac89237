"""Conformance of the strategy ``elastic``."""

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)


class TestElastic(StrategyConformance):
    strategy = "elastic"
    # tests/elastic tests the rest of what matters by default.
    matrix = r"^(?!test_(equals_one_process\[sgd\]|evaluation_coverage|metadata))"
