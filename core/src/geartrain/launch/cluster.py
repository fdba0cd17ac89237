"""Read the launcher and the rank of this process from the environment.

Launchers are torchrun, geartrain and the user, and those of entry points ``geartrain.launchers``.
The name of such an entry point is a variable that the launcher sets in each rank; its object is
``read(environ) -> ClusterEnvironment | None``, which is imported only if the variable is set.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from importlib_metadata import EntryPoint

from geartrain.errors import UsageError
from geartrain.errors.distributions import entry_points

if TYPE_CHECKING:
    from geartrain.plan import Plan


def read_numbers(environ: Mapping[str, str], *names: str) -> list[int] | None:
    """Return the whole numbers in these variables; ``None`` if one is missing."""
    values = [environ.get(name, "") for name in names]
    return [int(value) for value in values] if all(value.isdigit() for value in values) else None


@dataclass(frozen=True, slots=True)
class ClusterEnvironment:
    """The place of this process among the launcher's. Ranks count from 0."""

    #: ``"torchrun"``, ``"geartrain"``, ``"environment"``, or the name of another launcher.
    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    #: The address of rank 0's store, if the launcher has it.
    master_addr: str | None = None
    master_port: int | None = None
    #: The job's name, the same in all of its ranks, which derive the port from it.
    job: str | None = None

    #: A variable that geartrain sets in the ranks that it starts, to the process's id. A program
    #: that a rank runs inherits the variable, has another id, and is no rank.
    started_by = "GEARTRAIN_STARTED_BY"
    read_numbers = staticmethod(read_numbers)

    @property
    def nodes(self) -> int:
        """The number of nodes, at least 1."""
        return max(1, self.size // max(1, self.local_size))

    @staticmethod
    def starts_rank_0(place: ClusterEnvironment | None, num_nodes: int) -> bool:
        """True if the process in this place is rank 0 or starts it."""
        if place is not None:
            return place.rank == 0
        node_rank = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
        return num_nodes == 1 or node_rank == "0"

    def check(self, plan: Plan) -> None:
        """Refuse a plan whose number of processes is not the launcher's.

        Raises:
            UsageError: the numbers differ.
        """
        planned = plan.processes
        if planned is None or planned == self.size:
            return
        per_node, nodes = plan.layout.processes_per_node, plan.num_nodes
        starter = "the first fit of this program" if self.launcher == "geartrain" else self.launcher
        raise UsageError(
            f"the plan has {planned} processes ({per_node} on each of {nodes} nodes), but "
            f"{starter} started {self.size} ({self.local_size} on each of {self.nodes} nodes). "
            f"Fix: --devices {self.local_size} --num-nodes {self.nodes}, or start {planned}"
        )


def detect(environ: Mapping[str, str] = os.environ) -> ClusterEnvironment | None:
    """Return this process's place, or ``None`` if it was not started as one of several.

    Raises:
        UsageError: variables that contradict each other.
    """
    if environ.get(ClusterEnvironment.started_by, str(os.getpid())) != str(os.getpid()):
        return None
    installed = (point.load() for point in _launchers() if point.name in environ)
    for read in (_torchrun, *installed, _by_hand):
        place: ClusterEnvironment | None = read(environ)
        if place is None:
            continue
        if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
            raise UsageError(
                f"{place.launcher} says rank {place.rank} of {place.size}, local rank "
                f"{place.local_rank} of {place.local_size}: a rank must be below its size. "
                "Fix: correct the environment variables of this process"
            )
        return place
    return None


@functools.cache  # each search reads all installed metadata
def _launchers() -> list[EntryPoint]:
    return sorted(entry_points(group="geartrain.launchers"), key=lambda point: point.name)


def _torchrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read torchrun's variables, which geartrain sets too.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    found = read_numbers(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    is_ours = ClusterEnvironment.started_by in environ
    if found is None or not ("TORCHELASTIC_RUN_ID" in environ or is_ours):
        return None
    rank, size, local_rank, local_size = found
    launcher = "geartrain" if is_ours else "torchrun"
    node = read_numbers(environ, "GROUP_RANK") or read_numbers(environ, "NODE_RANK")
    node_rank = node[0] if node else rank // max(1, local_size)
    return ClusterEnvironment(launcher, rank, size, local_rank, local_size, node_rank)


def _by_hand(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the user's variables: ``WORLD_SIZE`` and ``LOCAL_RANK``, and others that are set."""
    found = read_numbers(environ, "WORLD_SIZE", "LOCAL_RANK")
    if found is None:
        return None
    size, local_rank = found
    node = (read_numbers(environ, "NODE_RANK") or [0])[0]
    rank = read_numbers(environ, "RANK")
    local_size = read_numbers(environ, "LOCAL_WORLD_SIZE")
    if local_size is None and node and not rank:
        message = f"NODE_RANK={node}: how many processes a node holds is not known"
        raise UsageError(f"{message}. Fix: set RANK or LOCAL_WORLD_SIZE too")
    if local_size is None:
        # All nodes have equally many processes: the rank gives the number, or there is one node.
        local_size = [(rank[0] - local_rank) // node] if rank and node else [size]
    of_node = local_size[0]
    global_rank = rank[0] if rank else node * of_node + local_rank
    return ClusterEnvironment("environment", global_rank, size, local_rank, of_node, node)
