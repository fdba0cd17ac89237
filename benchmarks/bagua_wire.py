"""Bytes and time per step of Bagua's algorithms between two hosts, for several network speeds.

The hosts are network namespaces on this machine, joined by a virtual cable with a limited rate (a
token bucket of the kernel, in each direction). 20 MiB of gradients, one rank per host, the program
of tests/bagua/wire.py. Needs root and iproute2; nothing else may run on the machine.

    python benchmarks/bagua_wire.py [--algorithms gradient_allreduce bytegrad half power_sgd]
                                    [--gbit 10 1 0.1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STEPS = 40
WIRE = Path(__file__).parents[1] / "tests" / "bagua" / "wire.py"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@contextmanager
def hosts(gbit: float) -> Iterator[list[str]]:
    """Two namespaces, 10.96.0.1 and 10.96.0.2, connected with packets of 1500 bytes."""
    unique = uuid.uuid4().hex[:6]
    names = [f"gear-{unique}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            f"v{unique}0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"v{unique}1",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            device = f"v{unique}{i}"
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.96.0.{i + 1}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            limit = ["rate", f"{gbit}gbit", "burst", "256kb", "latency", "50ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit],
                check=True,
                timeout=20,
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def a_step(algorithm: str, gbit: float) -> dict[str, float]:
    """Return the bytes that the first host sent, and milliseconds, per step."""
    with hosts(gbit) as names:
        runs = []
        for i, name in enumerate(names):
            address = [
                "MASTER_ADDR=10.96.0.1",
                "MASTER_PORT=29531",
                f"NODE_RANK={i}",
                "OMP_NUM_THREADS=1",
                f"STEPS={STEPS}",
            ]
            command = [
                "ip",
                "netns",
                "exec",
                name,
                "env",
                *address,
                sys.executable,
                str(WIRE),
                algorithm,
            ]
            runs.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        try:
            (printed, error), _ = [run.communicate(timeout=300) for run in runs]
        finally:
            for run in runs:
                run.kill()
    if "a step:" not in printed:
        raise SystemExit(error)
    facts = json.loads(printed.rpartition("a step:")[2])
    return {"sent_mb": round(facts["sent"] / 1e6, 2), "ms": round(facts["seconds"] * 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=["gradient_allreduce", "bytegrad", "half", "power_sgd"]
    )
    parser.add_argument("--gbit", nargs="+", type=float, default=[10, 1, 0.1])
    options = parser.parse_args()
    facts = {
        f"{gbit:g} Gbit/s": {name: a_step(name, gbit) for name in options.algorithms}
        for gbit in options.gbit
    }
    json.dump({**facts, "torch": torch.__version__}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
