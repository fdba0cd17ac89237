"""Run random draws and print the outcomes by border.

python tests/swarm --draws 2000 --seed 1 --json FILE
python tests/swarm --seed 1 --only 17
python tests/swarm --draw "killed single scheduler=MultiStepLR"
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "shared")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--draw", action="append", default=[], help="the text of a draw")
    parser.add_argument("--border", default="")
    parser.add_argument(
        "--in-process", action="store_true", help="no strategy that starts processes"
    )
    parser.add_argument("--shrink", action="store_true", help="look for the simplest failing draw")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quiet", action="store_true", help="print no draw that is equal")
    given = parser.parse_args()

    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    from tests.swarm import borders, draws, pools

    warm(pools)
    gc.freeze()  # a collection in a fork would copy the shared memory
    if given.draw:
        chosen = [(str(n), draws.Draw.read(text)) for n, text in enumerate(given.draw)]
    else:
        numbers = range(given.first, given.first + given.draws)
        numbers = numbers if given.only is None else [given.only]
        chosen = [
            (f"{given.seed}:{n}", draws.draw(given.seed, n, given.border, not given.in_process))
            for n in numbers
        ]
    found = []
    temporary = tempfile.mkdtemp(prefix="geartrain-swarm-")  # a fork would remove a context's
    folder = Path(temporary, "draw")
    for number, draw in chosen:
        start = time.monotonic()
        verdict, text = borders.outcome(draw, folder)
        if verdict in ("wrong", "hang") and given.shrink:
            draw, text = shrunk(draw, text, folder)
        seconds = round(time.monotonic() - start, 2)
        found.append(
            {"number": number, "draw": str(draw), "border": draw.border, "outcome": verdict}
            | {"text": text, "seconds": seconds}
        )
        if verdict != "equal" or not given.quiet:
            print(f"{number} {verdict} ({seconds} s): {draw}\n    {text}"[:1500], flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    shutil.rmtree(temporary)
    counts = Counter((line["border"], line["outcome"]) for line in found)
    kinds = ("equal", "refused", "wrong", "hang")
    print(f"{'border':<16}" + "".join(f"{kind:>9}" for kind in kinds))
    for border in sorted({line["border"] for line in found}):
        print(f"{border:<16}" + "".join(f"{counts[border, kind]:>9}" for kind in kinds))
    return int(any(line["outcome"] in ("wrong", "hang") for line in found))


def shrunk(draw, text, folder):
    """Return the simplest draw that still fails, with its text."""
    from tests.swarm import borders, draws

    for simpler in draws.simpler(draw):
        verdict, other = borders.outcome(simpler, folder)
        if verdict in ("wrong", "hang"):
            return shrunk(simpler, other, folder)
    return draw, text


def warm(pools):
    """Import what runs need, once, so that forks have it."""
    for group in ("plugins", "strategies", "precisions"):
        for name, entry in pools.entries(group).items():
            if name not in (*pools.LEFT_OUT, "deepspeed", "horovod"):
                entry.load()


if __name__ == "__main__":
    sys.exit(main())
