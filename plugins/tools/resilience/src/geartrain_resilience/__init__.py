"""Failures of runs, for geartrain.

- ``restarts``: the plugin that ``--max-restarts`` selects: it refuses plans that cannot be
  restarted, and keeps metrics.jsonl without gap and doubled step.
- ``supervision``: the process that runs the command, and runs it again after a failure.
- ``processes``: the processes that a failed run left.
- ``preemption``: the plugin that saves and ends when a signal asks for it.
- ``sentinel``: the plugin that ends a run that stands still, and names the late rank.
- ``chaos``: the plugin that causes faults.
- ``remote``: the plugin that keeps a run in a remote store too.
- ``exchange``: the messages between a run and its supervisor.
"""

from geartrain_resilience._version import __version__ as __version__

#: Exit code of a run that was saved because a signal asked it to end: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75
