"""Check geartrain on the GPU of this machine, in minutes.

A GPU is rarely at hand, so everything that should run on one is prepared here. Each part is a file
of tests in a process of its own with a deadline; the cheapest and most telling parts come first.
Each prints a line. ``--json FILE`` appends a row for each, so that a check that is cut off keeps
what it had. Without a GPU each part says so, and the exit code is 0.

    python tests/tools/gpu_check.py --json gpu.jsonl
    python tests/tools/gpu_check.py --device cpu --only precision resume
    python tests/tools/gpu_check.py --table benchmarks/gpu_check.jsonl

The check runs with the torch that is there, and needs the workspace, as CONTRIBUTING.md installs
it. ``--table`` writes the rows of a file into docs/cuda.md.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = "tests/cuda/check/test_{}.py"
PAGE = ROOT / "docs" / "cuda.md"
MARKS = "<!-- generated: gpu_check -->", "<!-- end of gpu_check -->"


@dataclass(frozen=True)
class Part:
    """A file of tests, or a benchmark.

    Args:
        name: the name for ``--only``.
        covers: a phrase for the table.
        command: the words after ``python``.
        seconds: the deadline.
        only_cuda: the part checks what only a GPU has.
    """

    name: str
    covers: str
    command: tuple[str, ...]
    seconds: int
    only_cuda: bool = False


def suite(name: str, covers: str, seconds: int, file: str = "", **options: bool) -> Part:
    words = ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "--show-capture=no")
    return Part(name, covers, (*words, file or CHECK.format(name)), seconds, **options)


#: In the order in which they run.
PARTS = [
    suite(
        "steps",
        "accumulation, clipping, manual optimisation, LBFGS, Session, activation checkpointing, "
        "validate, test and predict, deterministic",
        60,
    ),
    suite("precision", "32-true, 64-true, bf16-true, bf16-mixed, 16-mixed", 45),
    suite("files", "checkpoints across devices, safetensors", 60),
    suite("resume", "kill and resume, --max-restarts, equal in every bit", 120),
    suite("monitors", "profile, throughput, device_stats, steps that wait for nothing", 60),
    suite("bagua", "codes of the compression", 60),
    suite(
        "accelerator",
        "NVML, counting, prefetching, settings, an asynchronous checkpoint",
        90,
        "tests/cuda/test_on_gpu.py",
        only_cuda=True,
    ),
    suite(
        "strategies",
        "ddp, ddp_spawn, fsdp, ddp_sharded, tensor_parallel, bagua, deepspeed: one rank with NCCL, "
        "two ranks of one GPU over gloo",
        150,
    ),
    suite("memory", "a real out-of-memory error, explain --memory beside the measured peak", 150),
    suite("compile", "torch.compile, a checkpoint across compiled and not", 120),
    Part(
        "benchmark",
        "an MLP, a transformer in bf16 and a CNN beside the loop by hand and other trainers",
        ("benchmarks/gpu.py", "--rounds", "5"),
        150,
    ),
]


@dataclass
class Row:
    """The result of a part."""

    part: str
    #: ``passed``, ``failed``, ``skipped``, ``no GPU``, or ``late``: ended at its deadline.
    result: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    #: Names of failed tests; reasons of skipped ones; the facts of a benchmark.
    notes: list[str] | None = None


def run(part: Part, device: str) -> Row:
    """Run a part until its deadline."""
    if part.only_cuda and device != "cuda":
        return Row(part.name, "skipped", 0.0, notes=["needs a GPU"])
    with tempfile.TemporaryDirectory() as folder:
        report, out = Path(folder, "report.xml"), Path(folder, "out")
        of_tests = part.command[0] == "-m"
        words = [sys.executable, *part.command]
        if of_tests:
            words += ["--junitxml", str(report)]
        elif device == "cpu":  # the benchmark itself is checked
            words += ["--device", "cpu", "--what", "mlp", "--steps", "5"]
        environ = os.environ | {"GEARTRAIN_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1"}
        start = time.monotonic()
        with out.open("w") as stream:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environ, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code = process.wait(part.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Also what the part left behind.
                _end(process)
        row = Row(part.name, "passed" if code == 0 else "failed", time.monotonic() - start)
        if code is None:
            row.result = "late"
        elif of_tests and report.exists():
            _read(report, row)
        elif not of_tests and code == 0:
            row.notes = [out.read_text()]
        if row.result in ("failed", "late"):
            print(out.read_text()[-6000:], file=sys.stderr, flush=True)
        row.seconds = round(row.seconds, 1)
        return row


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(report: Path, row: Row) -> None:
    """Count the tests of a report of pytest."""
    names, reasons = [], set()
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = case.find("failure") is not None or case.find("error") is not None
        skip = case.find("skipped")
        row.failed += wrong
        row.skipped += skip is not None
        row.passed += not wrong and skip is None
        if wrong:
            names.append(str(case.get("name")))
        if skip is not None:
            reasons.add(str(skip.get("message")))
    row.notes = names + sorted(reasons)
    if row.result == "passed" and not row.passed:
        row.result = "skipped"


def machine(device: str) -> dict[str, str]:
    """Return what a row needs to be read later: device, versions and day."""
    import torch

    card = torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or "cpu"
    return {
        "accelerator": device,
        "device": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "day": datetime.date.today().isoformat(),
    }


def has_device(device: str) -> bool:
    """Ask in another process, so that no context stays in this one."""
    if device == "cpu":
        return True
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def check(parts: list[Part], device: str, file: Path | None) -> int:
    """Run the parts, print and write a row for each, and return the exit code."""
    there = has_device(device)
    facts = machine(device) if there else {}
    print(" ".join(facts.values()) or "no GPU", flush=True)
    rows = []
    for part in parts:
        row = run(part, device) if there else Row(part.name, "no GPU", 0.0)
        rows.append(row)
        counts = f"{row.passed} passed, {row.failed} failed, {row.skipped} skipped"
        line = f"{row.part:12} {row.result:8} {row.seconds:6.1f} s  {counts}"
        print(line, *(row.notes or [])[:20], sep="\n    ", flush=True)
        if file is not None:
            with file.open("a") as stream:
                stream.write(json.dumps(asdict(row) | facts) + "\n")
    print(f"{sum(row.seconds for row in rows):.0f} s")
    return int(any(row.result in ("failed", "late") for row in rows))


def table(rows: list[dict]) -> str:
    """Return a table of the newest row of each part on each device."""
    gpus = [row for row in rows if row.get("accelerator") == "cuda"]
    if not gpus:
        return "No part of the check has run on a GPU yet."
    newest = {(row["device"], row["part"]): row for row in gpus}
    devices = sorted({device for device, _ in newest})
    lines = ["| part | covers | " + " | ".join(devices) + " |", "|---" * (2 + len(devices)) + "|"]
    for part in PARTS:
        cells = []
        for device in devices:
            row = newest.get((device, part.name))
            found = "not run" if row is None else f"{row['result']}, {row['passed']} tests"
            cells.append(found + (f", torch {row['torch']}, {row['day']}" if row else ""))
        lines.append(f"| {part.name} | {part.covers} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(file: Path) -> None:
    """Replace the table of docs/cuda.md by that of a file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    before, start, after = PAGE.read_text().partition(MARKS[0])
    _, end, after = after.partition(MARKS[1])
    PAGE.write_text(f"{before}{start}\n\n{table(rows)}\n\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a row for each part")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write docs/cuda.md, no check")
    options = parser.parse_args()
    if options.table is not None:
        write_table(options.table)
        return 0
    parts = [part for part in PARTS if part.name in options.only]
    return check(parts, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
