"""The plugin ``compile`` for geartrain."""

from __future__ import annotations

from geartrain_compile._version import __version__
from geartrain_compile.plugin import Compile

__all__ = ["Compile", "__version__"]
