"""Run the figures beside other trainers, and print them as Markdown for RESULTS.md.

    python -m benchmarks [loop adam table end_to_end startup ranks] [--quick] [--chart FILE.svg]

The figures need a machine without other work. A figure whose loop by hand differs from itself by
more than 0.02 says that it is void. Trainers that are not installed are left out; all of them:
``pip install pytorch-lightning lightning-fabric accelerate pytorch-ignite``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: Whose versions are printed.
DISTRIBUTIONS = (
    *("torch", "geartrain", "pytorch-lightning", "lightning-fabric", "accelerate"),
    "pytorch-ignite",
)


@dataclass(frozen=True)
class Figure:
    """A program of this folder, and what it shows."""

    title: str
    command: tuple[str, ...]
    #: Arguments that make it take seconds, to see whether it works.
    quick: tuple[str, ...]


FIGURES = {
    "loop": Figure(
        "A step over that of the loop by hand: SGD",
        ("overhead.py", "--bar"),
        ("--rounds", "10", "--steps", "5"),
    ),
    "adam": Figure(
        "A step over that of the loop by hand: Adam, six networks",
        (
            *("overhead.py", "--optimizer", "adam"),
            *("--what", "mlp", "graph", "cnn", "rnn", "transformer", "gpt"),
            *("--rows", "by an expert", "geartrain", "geartrain, fast", "Lightning"),
        ),
        ("--rounds", "5", "--steps", "2"),
    ),
    "table": Figure(
        "Epochs over a table, loader and steps",
        ("table.py",),
        ("--rounds", "4", "--rows", "2000"),
    ),
    "end_to_end": Figure(
        "From the shell to the exit", ("end_to_end.py",), ("--rounds", "1", "--epochs", "1")
    ),
    "startup": Figure("To the first step of two processes", ("startup.py",), ("--rounds", "1")),
    "ranks": Figure("A step on two ranks", ("strategies.py",), ("--rounds", "1", "--steps", "20")),
}


def machine() -> str:
    """Return the date, the machine, its load and the versions in one line."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    parts = [date.today(), model or platform.processor(), f"{os.cpu_count()} cores", load]
    return ", ".join(map(str, [*parts, f"Python {platform.python_version()}", *found]))


def draw(facts: dict[str, Any], file: Path) -> None:
    """Draw the ratios of the first network as bars."""
    from matplotlib.figure import Figure as Canvas

    rows = next(iter(facts.values()))["rows"]
    names = sorted(rows, key=lambda name: rows[name]["ratio"], reverse=True)
    canvas = Canvas(figsize=(7, 0.35 * len(names) + 0.6), layout="constrained")
    axes = canvas.subplots()
    colors = ["tab:blue" if name.startswith("geartrain") else "lightgray" for name in names]
    bars = axes.barh(names, [rows[name]["ratio"] for name in names], color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("CPU time of a step over that of the loop by hand")
    canvas.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--quick", action="store_true", help="seconds, to see that all works")
    parser.add_argument("--chart", type=Path, help="draw the figure loop")
    options = parser.parse_args()
    if unknown := set(options.figures) - FIGURES.keys():
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    print(f"{machine()}:", flush=True)
    for name in options.figures or FIGURES:
        figure = FIGURES[name]
        program, *arguments = figure.command
        arguments += figure.quick if options.quick else ()
        line = " ".join([f"python benchmarks/{program}", *map(quoted, arguments)])
        print(f"\n### {figure.title}\n\n    {line}\n", flush=True)
        charted = options.chart is not None and name == "loop"
        done = subprocess.run(
            [sys.executable, str(FOLDER / program), *arguments, *["--json"] * charted],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{program} ended with {done.returncode}")
        if charted:
            sys.path.insert(0, str(FOLDER))
            from overhead import table

            facts = json.loads(done.stdout)
            draw(facts, options.chart)
            print(f"{table(facts)}\n\n![The same as bars]({options.chart.name})", flush=True)
        else:
            print(done.stdout.strip(), flush=True)


def quoted(argument: str) -> str:
    return f'"{argument}"' if " " in argument else argument


if __name__ == "__main__":
    main()
