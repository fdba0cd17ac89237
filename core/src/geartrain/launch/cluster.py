"""Read the launcher and the rank of this process from the environment.

Launchers are torchrun, horovodrun, SLURM, Open MPI, MPICH, LSF, geartrain and the user.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import UsageError

if TYPE_CHECKING:
    from geartrain.plan import Plan

#: geartrain sets it in the ranks that it starts, to the process's id. A program that a rank runs
#: inherits the variable, has another id, and is no rank.
STARTED_BY = "GEARTRAIN_STARTED_BY"
#: Variables with the name of a job, which is the same in all of its processes.
_JOBS = (
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "SLURM_JOB_ID", "PMIX_NAMESPACE"),
    *("OMPI_MCA_ess_base_jobid", "LSB_JOBID"),
)
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
#: MPI launcher -> its variables for rank, size, local rank and local size.
_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _NUMBERS),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "LSF": tuple(f"JSM_NAMESPACE_{name}" for name in _NUMBERS),
}


@dataclass(frozen=True, slots=True)
class ClusterEnvironment:
    """The place of this process among the launcher's. Ranks count from 0."""

    #: ``"torchrun"``, ``"horovodrun"``, ``"SLURM"``, ``"Open MPI"``, ``"MPICH"``, ``"LSF"``,
    #: ``"geartrain"`` or ``"environment"``.
    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    #: The address of rank 0's store; ``None`` under horovodrun on several nodes, which needs none.
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes, at least 1."""
        return max(1, self.size // max(1, self.local_size))


def detect(environ: Mapping[str, str] = os.environ) -> ClusterEnvironment | None:
    """Return this process's place, or ``None`` if it was not started as one of several.

    Raises:
        UsageError: variables that contradict each other.
    """
    if environ.get(STARTED_BY, str(os.getpid())) != str(os.getpid()):
        return None
    for read in (_torchrun, _horovodrun, _slurm, _mpi, _by_hand):
        place = read(environ)
        if place is None:
            continue
        if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
            raise UsageError(
                f"{place.launcher} says rank {place.rank} of {place.size}, local rank "
                f"{place.local_rank} of {place.local_size}: a rank must be below its size. "
                "Fix: correct the environment variables of this process"
            )
        return _with_address(place, environ)
    return None


def starts_rank_0(
    place: ClusterEnvironment | None, num_nodes: int, environ: Mapping[str, str] = os.environ
) -> bool:
    """True if this process is rank 0 or starts it."""
    if place is not None:
        return place.rank == 0
    return num_nodes == 1 or environ.get("NODE_RANK", environ.get("GROUP_RANK", "0")) == "0"


def check_processes(plan: Plan, place: ClusterEnvironment) -> None:
    """Refuse a plan whose number of processes is not the launcher's.

    Raises:
        UsageError: the numbers differ.
    """
    planned = plan.processes
    if planned is None or planned == place.size:
        return
    per_node, nodes = plan.layout.processes_per_node, plan.num_nodes
    starter = "the first fit of this program" if place.launcher == "geartrain" else place.launcher
    raise UsageError(
        f"the plan has {planned} processes ({per_node} on each of {nodes} nodes), but {starter} "
        f"started {place.size} ({place.local_size} on each of {place.nodes} nodes). "
        f"Fix: --devices {place.local_size} --num-nodes {place.nodes}, or start {planned}"
    )


# --- launchers ------------------------------------------------------------------------------------


def _numbers(environ: Mapping[str, str], *names: str) -> list[int] | None:
    values = [environ.get(name, "") for name in names]
    return [int(value) for value in values] if all(value.isdigit() for value in values) else None


def _torchrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read torchrun's variables, which geartrain sets too.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    found = _numbers(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if found is None or not ("TORCHELASTIC_RUN_ID" in environ or STARTED_BY in environ):
        return None
    rank, size, local_rank, local_size = found
    launcher = "geartrain" if STARTED_BY in environ else "torchrun"
    node = _numbers(environ, "GROUP_RANK") or _numbers(environ, "NODE_RANK")
    node_rank = node[0] if node else rank // max(1, local_size)
    return ClusterEnvironment(launcher, rank, size, local_rank, local_size, node_rank)


def _horovodrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of horovodrun on Gloo; on MPI it sets MPI's.

    Source: https://horovod.readthedocs.io/en/stable/running_include.html
    """
    found = _numbers(environ, *(f"HOROVOD_{n}" for n in (*_NUMBERS, "CROSS_RANK", "CROSS_SIZE")))
    if found is None:
        return None
    rank, size, local_rank, local_size, node_rank, _ = found
    return ClusterEnvironment("horovodrun", rank, size, local_rank, local_size, node_rank)


def _slurm(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of a task of srun. A batch script has a job but no step, and is no rank.

    Source: https://slurm.schedmd.com/srun.html
    """
    found = _numbers(environ, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    size = _numbers(environ, "SLURM_STEP_NUM_TASKS") or _numbers(environ, "SLURM_NTASKS")
    if found is None or size is None or size[0] < 2 or _is_shell(environ, found[1], size[0]):
        return None
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    per_node = re.match(r"\d+", text)
    nodes = max(1, int(environ.get("SLURM_NNODES", "1")))
    local_size = int(per_node[0]) if per_node else size[0] // nodes
    _, rank, local_rank, node_rank = found
    host = _first_host(environ)
    return ClusterEnvironment("SLURM", rank, size[0], local_rank, local_size, node_rank, host)


def _is_shell(environ: Mapping[str, str], task: int, tasks: int) -> bool:
    """True if a step is a shell, by its name as in Lightning.

    In an interactive job ranks have this name too: then SLURM_TASK_PID is this process.
    """
    job = environ.get("SLURM_JOB_NAME")
    if job not in ("bash", "interactive") or environ.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    if task > 0:  # a shell has one task
        what = f"a job that is called {job!r} is taken for a shell. Fix: srun --job-name=NAME"
        warnings.warn(
            f"this is task {task} of {tasks} of a SLURM step, and trains alone: {what}",
            stacklevel=2,
        )
    return True


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first name in SLURM's compressed list: ``gpu[07-09,12],login`` -> ``gpu07``."""
    text = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else None


def _mpi(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read an MPI launcher's variables. Nodes are assumed to have equally many ranks."""
    for launcher, names in _MPI.items():
        found = _numbers(environ, *names)
        if found is not None and found[1] > 1:
            rank, size, local_rank, local_size = found
            host = _first_lsf_host(environ) if launcher == "LSF" else None
            node = rank // max(1, local_size)
            return ClusterEnvironment(launcher, rank, size, local_rank, local_size, node, host)
    return None


def _first_lsf_host(environ: Mapping[str, str]) -> str | None:
    """Return rank 0's host: the second name in LSF's rank file, after the launch node."""
    path = Path(environ.get("LSB_DJOB_RANKFILE", ""))
    hosts = list(dict.fromkeys(path.read_text().split())) if path.is_file() else []
    return hosts[1] if len(hosts) > 1 else None


def _by_hand(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the user's variables: ``WORLD_SIZE`` and ``LOCAL_RANK``, and others that are set."""
    found = _numbers(environ, "WORLD_SIZE", "LOCAL_RANK")
    if found is None:
        return None
    size, local_rank = found
    node = (_numbers(environ, "NODE_RANK") or [0])[0]
    rank = _numbers(environ, "RANK")
    local_size = _numbers(environ, "LOCAL_WORLD_SIZE")
    if local_size is None and node and not rank:
        what = f"NODE_RANK={node}: how many processes a node holds is not known"
        raise UsageError(f"{what}. Fix: set RANK or LOCAL_WORLD_SIZE too")
    if local_size is None:
        # All nodes have equally many processes: the rank gives the number, or there is one node.
        local_size = [(rank[0] - local_rank) // node] if rank and node else [size]
    of_node = local_size[0]
    global_rank = rank[0] if rank else node * of_node + local_rank
    return ClusterEnvironment("environment", global_rank, size, local_rank, of_node, node)


def _with_address(place: ClusterEnvironment, environ: Mapping[str, str]) -> ClusterEnvironment:
    """Add the address of rank 0's store."""
    address = environ.get("MASTER_ADDR") or place.master_addr
    if address is None:
        if place.nodes > 1 and place.launcher == "horovodrun":
            return place  # Horovod connects its ranks itself
        if place.nodes > 1:
            what = f"{place.launcher} started {place.size} processes on {place.nodes} nodes"
            raise UsageError(f"{what}, and none knows where rank 0 is. Fix: set MASTER_ADDR")
        address = "127.0.0.1"
    given = _numbers(environ, "MASTER_PORT")
    # Every rank derives the same port from the job's name; MASTER_PORT replaces it if it is in use.
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if given is None and job is None and place.nodes > 1:
        what = f"{place.launcher} names no job from which {place.nodes} nodes could derive a port"
        raise UsageError(f"{what}. Fix: set MASTER_PORT")
    derived = 20000 + zlib.crc32((job or str(os.getppid())).encode()) % 20000
    return replace(place, master_addr=address, master_port=given[0] if given else derived)
