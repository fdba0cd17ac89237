"""Train cases one after another: ``program.py PART CASE...``; each case is JSON. What each rank has goes to ``CASE/rank-N.pt``."""

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
    sys.path.insert(
        0, str(Path(__file__).parents[1])
    )  # ranks of ddp_spawn import the classes of a case by this name
    main(*sys.argv[1:])
