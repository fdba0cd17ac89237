"""Kill processes of the strategy elastic at random moments; its run ends as one without kills.

The cases are those of kill_and_resume.py. One or two processes are killed, one after the other or
at once, also while others start again. The run must end by itself, equal bit for bit: weights,
optimizers, metrics, every line of metrics.jsonl, and the files.

Run it by hand; pytest does not collect it::

    python tests/drills/elastic_kills.py --cases 100 --kills 2 --seed 0
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import kill_and_resume
import torch
from kill_and_resume import NEVER, differences, draw, kill_of, start


def case_of(seed: int, number: int) -> dict[str, Any]:
    """Return a case: the same for the same numbers."""
    choose = random.Random(f"{seed} {number} elastic")
    case = draw(seed, number, "elastic")
    case["ranks"] = choose.choice([2, 2, 3])
    case["virtual_ranks"] = case["ranks"] + choose.choice([0, 0, 1])
    case["replace"] = choose.random() < 0.75
    case["asynchronous"] = False  # refused
    return case


def kills_of(
    choose: random.Random, case: dict[str, Any], whole: Path, folder: Path
) -> list[dict[str, Any]]:
    """Return random kills of the whole run, that leave a process."""
    ranks = {**case, "ranks": case["virtual_ranks"]}
    most = 2 if case["replace"] or case["ranks"] > 2 else 1
    return [
        {**kill_of(choose, ranks, whole), "all": False, "done": f"{folder}.{number}"}
        for number in range(choose.randint(1, most))
    ]


def outcome(case: dict[str, Any], whole: Path, folder: Path, kills: list[Any]) -> list[str]:
    """Run with kills, and compare; return what is wrong."""
    code, out = start(case, folder, kills)
    done = [Path(kill["done"]).exists() for kill in kills]
    wrong = differences(whole, folder) if code == 0 else [f"exit code {code}: {out[-2500:]}"]
    logs = [one / "run" / "metrics.jsonl" for one in (whole, folder)]
    texts = [path.read_text() if path.exists() else "" for path in logs]
    if texts[0] != texts[1]:
        wrong.append("metrics.jsonl has other lines")
    if not any(done):
        wrong.append("nothing was killed")
    return [*wrong, *re.findall("A PROCESS WAS LEFT|TIMEOUT", out)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--kills", type=int, default=2, help="runs of each case with kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="the number of one case")
    parser.add_argument("--keep", help="keep the runs in this folder")
    given = parser.parse_args()
    numbers = range(given.first, given.cases) if given.only is None else [given.only]
    counts: Counter[str] = Counter()
    torch.set_num_threads(1)
    for name in ("torchmetrics", "torch._dynamo"):  # imported here, so that forks have them
        importlib.import_module(name)
    temporary = tempfile.mkdtemp(prefix="geartrain-drill-")
    try:
        for number in numbers:
            case = case_of(given.seed, number)
            choose = random.Random(f"{given.seed} {number} kills")
            whole = Path(given.keep or temporary, str(number))
            whole.parent.mkdir(parents=True, exist_ok=True)
            code, out = start(case, whole, [NEVER])
            if code:
                counts["wrong"] += 1
                print(f"{number} WRONG: failed: {out[-2500:]} {json.dumps(case)}", flush=True)
                continue
            for repeat in range(given.kills):
                folder = whole.with_name(f"{number}-{repeat}")
                kills = kills_of(choose, case, whole, folder)
                wrong = outcome(case, whole, folder, kills)
                killed = sum(Path(kill["done"]).exists() for kill in kills)
                counts["kills"] += killed
                counts["wrong" if wrong else "equal"] += 1
                verdict = f"WRONG: {'; '.join(wrong)} {json.dumps(case)}" if wrong else "equal"
                places = [(kill["rank"], kill["at"]) for kill in kills]
                print(f"{number} {places} killed {killed} {verdict}", flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(temporary)
    print(dict(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        kill_and_resume.program(json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
