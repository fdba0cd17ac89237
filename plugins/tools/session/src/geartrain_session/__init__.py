"""``geartrain.Session``, for users who write their own loop.

- ``session``: :class:`Session`, which users call. It has one :class:`SessionRun` while it runs.
- ``arguments``: the checks of a Session's arguments.
- ``workers``: the set-up and teardown of each process around the loop: ``process_context``,
  ``ScriptWorker``, ``FunctionWorker``.
- ``session_run``: the models, optimizers and loaders of one run, and its steps.
- ``models``, ``loaders``, ``optimizers``: the objects that a session returns to the loop.
- ``collectives``, ``callbacks``, ``state``: reductions over ranks, methods that the loop calls by
  name, checkpoints.
"""

from __future__ import annotations

from geartrain_session._version import __version__
from geartrain_session.session import Session

__all__ = ["Session", "__version__"]
