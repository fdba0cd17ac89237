"""A fair lock for two threads, training and communication: a waiting thread gets the next turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Give one of two threads access to the weights.

    A plain lock is not enough: training releases it only for microseconds between two steps, so
    communication would rarely get it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depth = 0  # of training's turns, which may be nested
        self._wanted = False  # True while communication waits for its turn or has it

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold training's turn; it may be nested."""
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
        """Release training's turn, if it is held; communication may take any number of turns."""
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
        """Hold communication's turn; training that wants a turn later waits for it."""
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
