"""The imports of the forkserver before it forks the first rank: those on which a rank would spend its first second."""

import atexit
import gc
import os
from contextlib import suppress
from importlib import import_module

import torch._dynamo  # noqa: F401 (torch's optimizers import it when the first one is made)

import geartrain_spawn.rank
import geartrain_spawn.strategy  # noqa: F401

with suppress(
    Exception
):  # the progress bar, if it is installed, and rich, which rank 0 imports for it
    import_module("geartrain_callbacks.bars")

gc.freeze()  # else each rank's first collection touches all of these objects, and with them copies their memory

# Only the server runs it: ranks end by os._exit. Else it outlives the program by the seconds that Python takes to undo the imports.
atexit.register(os._exit, 0)
