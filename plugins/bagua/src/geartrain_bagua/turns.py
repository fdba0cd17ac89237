"""A lock for two threads, training and communication, of which the one that waits comes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Who may touch the weights.

    A plain lock is not enough: training lets go of it for microseconds between two steps, and communication would seldom get it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depth = 0  # of training, which may enter again inside itself
        self._wanted = False  # by communication, until it has had its turn

    @contextmanager
    def training(self) -> Iterator[None]:
        """Training's turn."""
        with self._changed:
            while self._wanted and not self._depth:
                self._changed.wait()
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._changed.notify_all()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Inside training's turn, if it is one: communication may have its own meanwhile, as often as it likes."""
        with self._changed:
            depth, self._depth = self._depth, 0
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                while self._wanted and depth:
                    self._changed.wait()
                self._depth = depth

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Communication's turn, which training that comes later waits for."""
        with self._changed:
            self._wanted = True
            while self._depth:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._wanted = False
                self._changed.notify_all()
