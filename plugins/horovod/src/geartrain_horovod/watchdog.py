"""Ends a run whose ranks wait for each other for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """Watches waits.

    Args:
        timeout: seconds that one may take.
        rank: this process's.
    """

    def __init__(self, timeout: float, rank: int) -> None:
        self.timeout, self.rank = timeout, rank

    @contextmanager
    def watching(self, what: str, name: str) -> Iterator[None]:
        """Watch one wait."""
        yield
