"""The version of core and of every plugin of this repository."""

__version__ = "0.1.0"
