"""The borders that state crosses. Each runs a draw with and without the border, and compares.

A run is a fork of this process, or one fork per rank; see tests/shared/rank_server.py.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rank_server
import torch

from geartrain_testing.launching import free_port

from ..drills.kill_and_resume import UNCOMPARED, values
from . import hand
from .program import KILLED, Draw, program

#: Strategies that start new processes, which import torch again; that takes seconds.
STARTS_PROCESSES = ("ddp_spawn", "spawn", "elastic")
#: Strategies for which the swarm starts one process: it has all ranks, or starts their processes.
ONE_PROCESS = ("single", "threads", "dp", "ddp2", *STARTS_PROCESSES)
#: Relative tolerance by precision, for runs that add up in another order.
TOLERANCE = {"64-true": 1e-7, "32-true": 2e-3}
SECONDS = {True: 90.0, False: 40.0}


class Refused(Exception):
    """geartrain refused a run before it began."""


class Wrong(Exception):
    """A run failed, or did not end as it should."""


class Hang(Exception):
    """A run did not end in time."""


class Runs:
    """Runs programs of one draw in subfolders of a folder."""

    def __init__(self, draw: Draw, folder: Path) -> None:
        self.draw, self.folder = draw, folder

    def run(self, name: str, ends: str = "", **part: Any) -> list[Any]:
        """Run one side of the border and return each rank's results; none if it was ended.

        Args:
            name: of the folder; a run that resumes has the folder of the one that ended.
            ends: ``"killed"`` or ``"error"`` if the run must end so, and not well.
            part: see :func:`swarm.program.program`.
        """
        strategy = part.setdefault("strategy", self.draw.strategy)
        ranks = part.setdefault("ranks", 1 if strategy == "single" else 2)
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for earlier in (*folder.glob("rank-*.*"), *folder.glob("begun-*")):
            earlier.unlink()
        part |= {"folder": str(folder), "ends": ends}
        processes = 1 if strategy in ONE_PROCESS else ranks
        request = {
            "function": program.__name__,
            "arguments": [asdict(self.draw), part],
            "ranks": processes,
            "place": "alone" if strategy in ONE_PROCESS else "rank",
            "folder": str(folder),
            "seconds": SECONDS[strategy in STARTS_PROCESSES],
        }
        codes = rank_server.run(program, request, free_port())
        errors = [path.read_text() for path in sorted(folder.glob("rank-*.error"))]
        if any("did not end" in code for code in codes):
            raise Hang(f"{name}: {codes}")
        if ends == "killed" and set(codes) == {str(KILLED)}:
            return []
        if ends == "killed" and errors and all(f"exit code {KILLED}" in e for e in errors):
            return []  # of the process that started the rank
        if ends == "error" and errors and all("Ended" in error for error in errors):
            return []
        if set(codes) != {"0"}:
            raise self._failure(name, folder, codes, errors)
        found = [torch.load(folder / f"rank-{n}.pt", weights_only=False) for n in range(processes)]
        return [result for result in found if result]

    def _failure(self, name: str, folder: Path, codes: list[str], errors: list[str]) -> Exception:
        text = " | ".join(dict.fromkeys(errors)) or " ".join(
            path.read_text()[-300:] for path in folder.glob("rank-*.err")
        )
        begun = any(folder.glob("begun-*"))
        ours = text.startswith(("UsageError", "TrainingError", "MisconfigurationException"))
        if ours and "Fix:" in text and not begun:
            return Refused(f"{name}: {text}")
        fault = (
            "failed" if not ours else "refused after it began" if begun else "refused without Fix:"
        )
        return Wrong(f"{name} {fault}, {codes}: {text}")


def compare(
    found: list[Any], expected: list[Any], tolerance: float = 0.0, refitted: bool = False
) -> list[str]:
    """Return the differences between results of ranks, in words.

    With another number of ranks, each is compared with the first one's weights and metrics.
    ``refitted``: files of a second fit may have ``-v1``, as they meet those of the first.
    """
    wrong = []
    for rank, result in enumerate(found):
        same_size = len(found) == len(expected)
        other = expected[rank if same_size else 0]
        if tolerance:
            names = ("weights", "metrics", "counters", "after", "test", "loaded")
            result, other = ({n: one[n] for n in names if n in one} for one in (result, other))
        else:
            # A resumed run knows only its own part of the steps.
            part = {key: other["trace"].get(key, "no such step") for key in result.get("trace", {})}
            other = {**other, "trace": part} if "trace" in other else other
        a, b = values(result), values(other)
        if refitted:
            a, b = without_version(a), without_version(b)
        for key in sorted(a.keys() | b.keys()):
            if any(f".{name}" in key for name in UNCOMPARED):
                continue
            if key not in a or key not in b:
                wrong.append(f"{key}: only {'here' if key in a else 'there'}")
            elif not equal(a[key], b[key], tolerance):
                wrong.append(f"{key}: {short(a[key])} != {short(b[key])}")
    return wrong


def without_version(found: dict[str, Any]) -> dict[str, Any]:
    return {
        key.replace("-v1", ""): value.replace("-v1", "") if isinstance(value, str) else value
        for key, value in found.items()
    }


def equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape:
            return False
        if tolerance and a.is_floating_point():
            return torch.allclose(
                a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, str) and isinstance(b, str):
        return Path(a).name == Path(b).name  # each run has its folder
    if tolerance and isinstance(a, float) and isinstance(b, float):
        return equal(torch.tensor(a), torch.tensor(b), tolerance)
    return bool(a == b or (a != a and b != b))


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.flatten()[:3].tolist()
    return str(value)[:60]


# --- the borders ----------------------------------------------------------------------------------


def resume(runs: Runs, ends: str, tolerance: float = 0.0, **other: Any) -> list[str]:
    """End a run at the moment of the draw, and resume it, perhaps with another strategy or size."""
    whole = runs.run("whole")
    if complete := runs.run("part", ends=ends):  # it had stopped before the moment
        return compare(complete, whole)
    path = "auto" if runs.draw.saved == "auto" else str(runs.folder / "part" / "now.ckpt")
    return compare(runs.run("part", resume=path, **other), whole, tolerance)


def killed(runs: Runs) -> list[str]:
    """A run is killed, and another process resumes it."""
    return resume(runs, "killed")


def error(runs: Runs) -> list[str]:
    """A run ends with an error, and another process resumes it."""
    return resume(runs, "error")


def epochs(runs: Runs) -> list[str]:
    """A run of one epoch ends, and a second run resumes it up to more epochs."""
    whole = runs.run("whole")
    runs.run("part", epochs=1)
    return compare(runs.run("part", resume="last"), whole)


def fits(runs: Runs) -> list[str]:
    """A trainer fits a second model as a new trainer does."""
    alone = runs.run("whole", fits=[1], no_output=True)
    return compare(runs.run("both", fits=[0, 1], no_output=True), alone, refitted=True)


def again(runs: Runs) -> list[str]:
    """A trainer fits a model a second time as a new trainer does."""
    new = runs.run("new", fits=[0, None], new_trainer=True, no_output=True)
    return compare(runs.run("same", fits=[0, None], no_output=True), new, refitted=True)


def evaluate(runs: Runs) -> list[str]:
    """A checkpoint tests and predicts as the module that was trained."""
    whole = runs.run("whole", then="test")
    file = str(runs.folder / "whole" / "run" / "last.ckpt")
    loaded = runs.run("load", then="load", file=file)
    expected = [{key: one[key] for key in ("test", "loaded")} for one in whole]
    # load_from_checkpoint makes a module in 32 bits.
    return compare(
        loaded, expected, 1e-2 if runs.draw.precision in ("64-true", "bf16-true") else 0.0
    )


def other_strategy(runs: Runs) -> list[str]:
    """A checkpoint of a strategy resumes under another one."""
    return resume(runs, "error", tolerance(runs.draw), strategy=runs.draw.other)


def other_size(runs: Runs) -> list[str]:
    """A checkpoint of two ranks resumes on four, or on one."""
    return resume(runs, "error", tolerance(runs.draw), ranks=int(runs.draw.other))


def sanity(runs: Runs) -> list[str]:
    """The sanity check changes nothing."""
    return compare(runs.run("with", sanity=2), runs.run("whole", sanity=0))


def ranks(runs: Runs) -> list[str]:
    """Two ranks train as one."""
    one = runs.run("whole", strategy="single")
    return compare(runs.run("two"), one, tolerance(runs.draw))


def death(runs: Runs) -> list[str]:
    """Under elastic a rank that dies changes nothing."""
    return compare(runs.run("death", dies=str(runs.folder / "died")), runs.run("whole"))


def by_hand(runs: Runs) -> list[str]:
    """A loop by hand gives the same weights, from the batches that the run saw."""
    found = runs.run("whole", keep_batches=True)
    return compare(
        [{"weights": one["weights"], "after": one["after"]} for one in found],
        [hand.train(runs.draw, found[0]["batches"])],
        1e-4,
    )


def tolerance(draw: Draw) -> float:
    rounded = 5e-2  # Muon computes in bfloat16
    return rounded if draw.optimizer == "Muon" else TOLERANCE.get(draw.precision, rounded)


#: The border by name.
BORDERS: dict[str, Callable[[Runs], list[str]]] = {
    function.__name__: function
    for function in (
        killed,
        error,
        epochs,
        fits,
        again,
        evaluate,
        other_strategy,
        other_size,
        sanity,
        ranks,
        death,
        by_hand,
    )
}


def outcome(draw: Draw, folder: Path) -> tuple[str, str]:
    """Return ``"equal"``, ``"refused"``, ``"wrong"`` or ``"hang"``, with the details in words."""
    shutil.rmtree(folder, ignore_errors=True)  # no finally: forks leave through this function too
    folder.mkdir(parents=True)
    try:
        wrong = BORDERS[draw.border](Runs(draw, folder))
    except Refused as refused:
        return "refused", str(refused)
    except Wrong as failure:
        return "wrong", str(failure)
    except Hang as hang:
        return "hang", str(hang)
    return (
        ("wrong", f"{len(wrong)} differences: {'; '.join(wrong[:4])}") if wrong else ("equal", "")
    )
