"""For those who keep their own loop: ``geartrain.Session``.

- ``session``: models, optimizers, loaders and steps; built on ``together``, which has collectives, logging and checkpoints, and that on
  ``launched``: planning, processes, teardown.
- ``working``: what each process does around the loop.
- ``models``, ``optimizers``: what a session hands back.
- ``state``: what a checkpoint holds.
"""

from __future__ import annotations

from geartrain_session._version import __version__
from geartrain_session.session import Session

__all__ = ["Session", "__version__"]
