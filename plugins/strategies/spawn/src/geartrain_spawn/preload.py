"""The forkserver imports this module before the first fork, which saves a second per rank."""

import atexit
import gc
import os
from contextlib import suppress
from importlib import import_module

import torch._dynamo  # noqa: F401 (torch's optimizers import it when the first one is made)

import geartrain_spawn.rank
import geartrain_spawn.strategy  # noqa: F401

# The progress bar, if it is installed, and rich, which it imports on rank 0.
with suppress(Exception):
    import_module("geartrain_callbacks.bars")

# Otherwise each rank's first garbage collection would write to these objects and copy their memory.
gc.freeze()

# Only the server runs this: ranks end by os._exit. Otherwise the server would outlive the program
# by the seconds that Python takes to undo the imports.
atexit.register(os._exit, 0)
