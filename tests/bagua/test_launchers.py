"""The strategy bagua under torchrun."""

import json
from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import free_port, launched

from .test_upstream import NORMS_OF_SHARDS, norm

#: In test_upstream.py, the strategy starts the ranks of the same cases.
pytestmark = pytest.mark.end_to_end

PROGRAM = str(Path(__file__).parents[1] / "shared" / "rank_program.py")


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
    train = (PROGRAM, "tests.bagua.upstream_cases", "train_on_one_device", json.dumps([case]))
    with (
        launched(*common, "--node_rank=0", *train, folder=folders[0]) as first,
        launched(*common, "--node_rank=1", *train, folder=folders[1]) as second,
    ):
        for run in (first, second):
            run.succeed(100)
    for rank, folder in enumerate(folders):
        weights = torch.load(folder / f"rank-{rank}.pt", weights_only=True)[case]
        assert norm(weights) == pytest.approx(NORMS_OF_SHARDS[case][rank], abs=1e-5)
