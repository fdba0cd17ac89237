"""Call a function on ranks that geartrain starts; see several_ranks.py.

Usage: ``python rank_program.py MODULE FUNCTION ARGUMENTS``.
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

if __name__ == "__main__":
    import torch

    module, function, arguments = sys.argv[1:]
    torch.save(
        getattr(importlib.import_module(module), function)(*json.loads(arguments)),
        f"rank-{os.environ.get('RANK', '0')}.pt",
    )
