"""Conformance of the strategy ``elastic``."""

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)


class TestElastic(StrategyConformance):
    strategy = "elastic"
    # Its processes end in the same way in each phase; tests/drills kills them at any moment.
    chosen = r"^(?!.*(signal\[SIG(SEGV|TERM)|error_in\[(?!setup|training_step|validation)))"
    # tests/elastic tests the rest of what matters by default.
    matrix = r"^(?!test_(evaluation_coverage|metadata))"
