"""The one place that holds the version; every plugin of this repository carries the same."""

__version__ = "0.1.0"
