"""Failures of runs, for geartrain.

- ``restarts``: the plugin that ``--max-restarts`` selects: it refuses plans that cannot be
  restarted, and keeps metrics.jsonl without gap and doubled step.
- ``supervision``: the process that runs the command, and runs it again after a failure.
- ``processes``: the processes that a failed run left.
- ``exchange``: what a run tells its supervisor, and the other way round.
"""

from geartrain_resilience._version import __version__ as __version__
