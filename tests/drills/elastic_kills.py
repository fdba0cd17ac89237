"""Kill or hang processes of the strategy elastic at random moments; its run ends as a quiet one.

The cases are those of kill_and_resume.py. One or two processes are killed, are stopped (SIGSTOP) or
wait without end, one after the other or at once, also while others start again. The run must end by
itself, equal bit for bit: weights, optimizers, metrics, every line of metrics.jsonl, and the files.

Run it by hand; pytest does not collect it::

    python tests/drills/elastic_kills.py --cases 100 --kills 2 --seed 0
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kill_and_resume import NEVER, differences, draw, forked, kill_of, program

#: Seconds after which a process that hangs is killed, and one that is stopped. Some start for 10 s.
TIMEOUT, STOPPED = 15.0, 2.0


def case_of(seed: int, number: int) -> dict[str, Any]:
    """Return a case: the same for the same numbers."""
    choose = random.Random(f"{seed} {number} elastic")
    case = draw(seed, number, "elastic")
    case["ranks"] = choose.choice([2, 2, 3, 4])
    case["virtual_ranks"] = case["ranks"] + choose.choice([0, 0, 1])
    case["replace"] = choose.random() < 0.75
    case["timeout"] = TIMEOUT
    case["asynchronous"] = False  # refused
    return case


def kills_of(case: dict[str, Any], whole: Path, folder: Path) -> list[dict[str, Any]]:
    """Return random deaths of the whole run that leave a process; the same for the same folder."""
    choose = random.Random(f"{json.dumps(case)} {folder.name} kills")
    ranks = {**case, "ranks": case["virtual_ranks"]}
    most = 2 if case["replace"] or case["ranks"] > 2 else 1
    return [
        {
            **kill_of(choose, ranks, whole),
            "all": False,
            "done": f"{folder}.{number}",
            "way": choose.choice(["kill", "stop", "hang"]),
        }
        for number in range(choose.randint(1, most))
    ]


def run_all(case: dict[str, Any], whole: Path, folders: list[Path]) -> None:
    """Run a case, and again with kills in each folder; torch is imported once for all ranks."""
    whole.mkdir()
    program(case, str(whole), [NEVER])
    for folder in folders:
        folder.mkdir()
        try:
            program(case, str(folder), kills_of(case, whole, folder))
        except Exception:
            traceback.print_exc()
            Path(f"{folder}.failed").touch()


def problems(whole: Path, folder: Path, kills: list[Any]) -> list[str]:
    """Return what is wrong with a run."""
    wrong = [] if not Path(f"{folder}.failed").exists() else ["it failed"]
    wrong += differences(whole, folder)
    logs = [each / "run" / "metrics.jsonl" for each in (whole, folder)]
    texts = [path.read_text() if path.exists() else "" for path in logs]
    if texts[0] != texts[1]:
        wrong.append("metrics.jsonl has other lines")
    if not any(Path(kill["done"]).exists() for kill in kills):
        wrong.append("nothing was killed")
    return wrong


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
    os.environ["GEARTRAIN_PATIENCE"] = f"stopped={STOPPED}"
    for name in ("torchmetrics", "torch._dynamo"):  # imported here, so that forks have them
        importlib.import_module(name)
    temporary = tempfile.mkdtemp(prefix="geartrain-drill-")
    try:
        for number in numbers:
            case = case_of(given.seed, number)
            whole = Path(given.keep or temporary, str(number))
            whole.parent.mkdir(parents=True, exist_ok=True)
            folders = [whole.with_name(f"{number}-{i}") for i in range(given.kills)]
            code, out = forked(
                whole, [], partial(run_all, case, whole, folders), 120 * (1 + given.kills)
            )
            if code:
                refused = "UsageError" in out
                counts["refused" if refused else "wrong"] += 1
                verdict = "refused" if refused else "WRONG: failed"
                print(f"{number} {verdict}: {out[-900:]} {json.dumps(case)}", flush=True)
                continue
            left = re.findall("A PROCESS WAS LEFT", out)
            for folder in folders:
                kills = kills_of(case, whole, folder)
                wrong = [*problems(whole, folder, kills), *left]
                killed = sum(Path(kill["done"]).exists() for kill in kills)
                counts["kills"] += killed
                counts["wrong" if wrong else "equal"] += 1
                verdict = "equal"
                if wrong:
                    verdict = f"WRONG: {'; '.join(wrong)} {json.dumps(case)} {out[-2500:]}"
                places = [(kill["rank"], kill["at"], kill["way"]) for kill in kills]
                print(f"{number} {places} killed {killed} {verdict}", flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(temporary)
    print(dict(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        program(json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
