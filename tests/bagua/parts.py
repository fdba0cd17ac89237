"""Runs programs of two ranks one after another in one: ``python parts.py FOLDER PART...``, each in a folder of its own."""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # which optimizers and DDP import

# A run of several ranks collects garbage at its end; without the objects of imported modules this takes a millisecond instead of 200.
gc.freeze()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for part in sys.argv[2:]:
        (folder / part).mkdir(exist_ok=True)
        os.chdir(folder / part)
        torch.manual_seed(0)
        runpy.run_path(str(Path(__file__).with_name(f"{part}_program.py")), run_name="__main__")
