"""Train cases one after the other: ``program.py PART CASE...``; each case is JSON.

Each rank saves its results to ``CASE/rank-N.pt``.
"""

import faulthandler
import json
import sys
import warnings
from pathlib import Path

import torch


def main(part, *cases):
    from combinations.case import Case, train

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in (Case(**json.loads(one)) for one in cases):
        found = train(case, Path(case.id, "run"), int(part))
        torch.save(found, Path(case.id, f"rank-{found['rank']}.pt"))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, repeat=True)  # shows where a rank hangs
    # Ranks of ddp_spawn import the classes of a case as ``combinations.case``.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(*sys.argv[1:])
