"""Run programs of two ranks one after another in one process, each in its own folder.

Usage: ``python parts.py FOLDER PART...``
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # optimizers and DDP import it

# A run of several ranks collects garbage at its end. Without the objects of imported modules this
# takes one millisecond instead of 200.
gc.freeze()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for part in sys.argv[2:]:
        (folder / part).mkdir(exist_ok=True)
        os.chdir(folder / part)
        torch.manual_seed(0)
        runpy.run_path(str(Path(__file__).with_name(f"{part}_program.py")), run_name="__main__")
