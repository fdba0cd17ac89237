"""The version, equal to geartrain's; a test checks it."""

__version__ = "0.1.0"
