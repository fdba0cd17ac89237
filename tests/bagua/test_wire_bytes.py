"""Bytes per step on the wire, counted by the interfaces of two connected network namespaces."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from two_hosts import two_hosts

from geartrain_testing.launching import launched

from .wire import PARAMETERS

#: test_minmax_uint8.py and test_power_sgd.py check the sizes of messages; here an interface counts
#: the bytes that are sent.
pytestmark = pytest.mark.end_to_end

RANKS = 2
WIRE = str(Path(__file__).parent / "wire.py")
#: Headers do not depend on the algorithm: their 66 bytes are 4.6% of a packet of 1500 bytes, but
#: 0.1% of this. (If an interface cuts larger packets itself, as veth by default, it counts the
#: larger packets, and 1500 would do. Not all machines do so.)
MTU = 65000
#: The largest bucket has as many chunks as there are ranks; there are two buckets.
CHUNKS = 2 * RANKS
K = 2 * (RANKS - 1) / RANKS
FORMULA = {"gradient_allreduce": K * 4 * PARAMETERS, "bytegrad": K * (PARAMETERS + 8 * CHUNKS)}


@pytest.fixture(scope="module")
def hosts():
    """Create two network namespaces, 10.98.0.1 and 10.98.0.2."""
    with two_hosts("10.98.0", MTU) as names:
        yield names


def counted(hosts: list[str], folder: Path, algorithm: str) -> list[dict[str, float]]:
    """Return the bytes per step that each host's interface sent and received."""
    address = {"MASTER_ADDR": "10.98.0.1", "MASTER_PORT": "29521"}
    with ExitStack() as stack:
        runs = []
        for i, host in enumerate(hosts):
            path = folder / f"{algorithm}-{i}"
            path.mkdir()
            options = {"before": ("ip", "netns", "exec", host), "NODE_RANK": str(i), **address}
            runs.append(stack.enter_context(launched(WIRE, algorithm, folder=path, **options)))
        for run in runs:
            run.succeed(100)
        return [json.loads(run.out.rpartition("a step:")[2]) for run in runs]


@pytest.fixture(scope="module")
def bytes_a_step(hosts, tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("wire")
    return {algorithm: counted(hosts, folder, algorithm) for algorithm in FORMULA}


@pytest.mark.parametrize("algorithm", FORMULA)
def test_bytes_on_the_wire_agree_with_the_formula(bytes_a_step, algorithm):
    for host in bytes_a_step[algorithm]:
        assert host["sent"] == pytest.approx(FORMULA[algorithm], rel=0.03)
        assert host["received"] == pytest.approx(FORMULA[algorithm], rel=0.03)


def test_bytegrad_sends_at_most_027_of_allreduce(bytes_a_step):
    full, short = (sum(host["sent"] for host in bytes_a_step[algorithm]) for algorithm in FORMULA)
    assert 0.24 < short / full <= 0.27
