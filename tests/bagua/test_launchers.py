"""The strategy bagua under torchrun."""

from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import free_port, launched, until

from .test_upstream import NORMS_OF_SHARDS, norm

#: In test_upstream.py, the strategy starts the ranks of the same cases.
pytestmark = pytest.mark.end_to_end

PROGRAM = str(Path(__file__).with_name("upstream_program.py"))


def test_joins_torchrun_and_trains_the_same(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    with launched(*torchrun, PROGRAM, folder=tmp_path, CASES="bytegrad of shards") as run:
        until(
            lambda: len(run.processes()) == 3 or run.process.poll() is not None,
            60,
            "torchrun and two ranks",
        )
        run.succeed(100)
        assert not (tmp_path / "logs").exists()
    for rank in range(2):
        weights = torch.load(tmp_path / f"kept-{rank}.pt", weights_only=True)
        expected = NORMS_OF_SHARDS["bytegrad of shards"]
        assert norm(weights["bytegrad of shards"]) == pytest.approx(expected, abs=2e-4)


def test_two_nodes_as_the_guide_starts_them(tmp_path):
    """Two launchers on loopback, with the arguments of ``baguarun``, start one rank each."""
    common = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=1",
        "--nnodes=2",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    )
    case = "gradient_allreduce of shards"
    folders = [tmp_path / str(node) for node in range(2)]
    for folder in folders:
        folder.mkdir()
    environment = {"CASES": case, "DEVICES": "1"}
    with (
        launched(*common, "--node_rank=0", PROGRAM, folder=folders[0], **environment) as first,
        launched(*common, "--node_rank=1", PROGRAM, folder=folders[1], **environment) as second,
    ):
        for run in (first, second):
            run.succeed(100)
    for rank, folder in enumerate(folders):
        weights = torch.load(folder / f"kept-{rank}.pt", weights_only=True)[case]
        assert norm(weights) == pytest.approx(NORMS_OF_SHARDS[case], abs=1e-5)
