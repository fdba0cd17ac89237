"""Bytes a step on the wire, as two hosts' interfaces count them: network namespaces joined by a cable."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from two_hosts import two_hosts

from geartrain_testing.launching import launched

from .wire import PARAMETERS

#: test_minmax_uint8.py and test_power_sgd.py assert how many bytes are made; here an interface counts those that are sent.
pytestmark = pytest.mark.end_to_end

RANKS = 2
WIRE = str(Path(__file__).parent / "wire.py")
#: Headers are no part of what an algorithm decides: 66 bytes are 4.6% of a packet of 1500 bytes and 0.1% of this. (Where the interface
#: is given larger packets to cut, as veth by default, it counts those, and 1500 would do; that is not so everywhere.)
MTU = 65000
#: The largest bucket has as many chunks as there are ranks; there are two buckets.
CHUNKS = 2 * RANKS
K = 2 * (RANKS - 1) / RANKS
FORMULA = {"gradient_allreduce": K * 4 * PARAMETERS, "bytegrad": K * (PARAMETERS + 8 * CHUNKS)}


@pytest.fixture(scope="module")
def hosts():
    """Two network namespaces, 10.98.0.1 and 10.98.0.2."""
    with two_hosts("10.98.0", MTU) as names:
        yield names


def counted(hosts: list[str], folder: Path, algorithm: str) -> list[dict[str, float]]:
    """What each host's interface sent and received a step."""
    address = {"MASTER_ADDR": "10.98.0.1", "MASTER_PORT": "29521"}
    with ExitStack() as stack:
        runs = []
        for i, host in enumerate(hosts):
            path = folder / f"{algorithm}-{i}"
            path.mkdir()
            before = ("ip", "netns", "exec", host)
            runs.append(
                stack.enter_context(
                    launched(
                        WIRE, algorithm, folder=path, before=before, NODE_RANK=str(i), **address
                    )
                )
            )
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
