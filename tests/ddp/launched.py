"""The conformance kit's launching, and where these tests are."""

from pathlib import Path

from geartrain.testing.launching import Launched, free_port, launched, listening, until

HERE = Path(__file__).parent

__all__ = ["HERE", "Launched", "free_port", "launched", "listening", "until"]
