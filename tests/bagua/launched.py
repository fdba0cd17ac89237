"""The conformance kit's launching, and where these tests are."""

from pathlib import Path

from geartrain.testing.launching import Launched, launched, until

HERE = Path(__file__).parent

__all__ = ["HERE", "Launched", "launched", "until"]
