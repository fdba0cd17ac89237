"""Read from the environment which launcher started this process, and as which rank: torchrun, horovodrun, SLURM, Open MPI, MPICH,
LSF, geartrain, or the user."""

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

#: Set by geartrain in the processes that it starts, to the process's own id: a program that a rank runs inherits it and is no rank.
STARTED_BY = "GEARTRAIN_STARTED_BY"
#: What launchers call a job, the same in all of its processes.
_JOBS = (
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "LSB_JOBID",
)
#: MPI launcher -> its variables for rank, size, local rank and local size.
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "LSF": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
}


@dataclass(frozen=True, slots=True)
class ClusterEnvironment:
    """The place of this process among the ranks, as its launcher says. Every number counts from 0."""

    #: What started it: ``"torchrun"``, ``"horovodrun"``, ``"SLURM"``, ``"Open MPI"``, ``"MPICH"``, ``"LSF"``, ``"geartrain"`` or
    #: ``"environment"``.
    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    #: Where rank 0's store is; ``None`` under horovodrun on several nodes, where Horovod needs none.
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def nodes(self) -> int:
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
                f"{place.launcher} says rank {place.rank} of {place.size}, local rank {place.local_rank} of {place.local_size}: "
                "a rank must be below its size. Fix: the environment variables of this process"
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
        UsageError: with both numbers, and how to start as many as are planned.
    """
    planned = plan.processes
    if planned is None or planned == place.size:
        return
    per_node, nodes = plan.layout.processes_per_node, plan.num_nodes
    who = "the first fit of this program" if place.launcher == "geartrain" else place.launcher
    raise UsageError(
        f"the plan has {planned} processes ({per_node} on each of {nodes} nodes), but {who} started {place.size} "
        f"({place.local_size} on each of {place.nodes} nodes). "
        f"Fix: --devices {place.local_size} --num-nodes {place.nodes}, or start {planned}"
    )


# --- launchers -----------------------------------------------------------------------------------------------------------


def _numbers(environ: Mapping[str, str], *names: str) -> list[int] | None:
    values = [environ.get(name, "") for name in names]
    return [int(value) for value in values] if all(value.isdigit() for value in values) else None


def _torchrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read torchrun's variables, which geartrain sets too: https://docs.pytorch.org/docs/stable/elastic/run.html"""
    found = _numbers(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if found is None or not ("TORCHELASTIC_RUN_ID" in environ or STARTED_BY in environ):
        return None
    rank, size, local_rank, local_size = found
    nodes = (
        _numbers(environ, "GROUP_RANK")
        or _numbers(environ, "NODE_RANK")
        or [rank // max(1, local_size)]
    )
    return ClusterEnvironment(
        "geartrain" if STARTED_BY in environ else "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        nodes[0],
    )


def _horovodrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of horovodrun on Gloo; on MPI it sets MPI's: https://horovod.readthedocs.io/en/stable/running_include.html"""
    found = _numbers(
        environ,
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    )
    if found is None:
        return None
    rank, size, local_rank, local_size, node_rank, _ = found
    return ClusterEnvironment("horovodrun", rank, size, local_rank, local_size, node_rank)


def _slurm(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of a task of srun. A batch script has a job but no step, and starts its processes itself: https://slurm.schedmd.com/srun.html"""
    found = _numbers(environ, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    size = _numbers(environ, "SLURM_STEP_NUM_TASKS") or _numbers(environ, "SLURM_NTASKS")
    if found is None or size is None or size[0] < 2 or _is_shell(environ, found[1], size[0]):
        return None
    per_node = re.match(
        r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    )
    local_size = (
        int(per_node[0]) if per_node else size[0] // max(1, int(environ.get("SLURM_NNODES", "1")))
    )
    return ClusterEnvironment(
        "SLURM", found[1], size[0], found[2], local_size, found[3], master_addr=_first_host(environ)
    )


def _is_shell(environ: Mapping[str, str], task: int, tasks: int) -> bool:
    """True if a step is a shell, by its name as in Lightning, and not this very process: in an interactive job ranks have its name too."""
    job = environ.get("SLURM_JOB_NAME")
    if job not in ("bash", "interactive") or environ.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    if task > 0:  # a shell has one
        warnings.warn(
            f"this is task {task} of {tasks} of a SLURM step, and trains alone: a job that is called {job!r} is taken for a shell. "
            "Fix: srun --job-name=NAME",
            stacklevel=2,
        )
    return True


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first name in SLURM's compressed list: ``gpu[07-09,12],login`` -> ``gpu07``."""
    text = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else None


def _mpi(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read an MPI launcher's variables; nodes are counted as if they held equally many ranks."""
    for launcher, names in _MPI.items():
        found = _numbers(environ, *names)
        if found is not None and found[1] > 1:
            rank, size, local_rank, local_size = found
            host = _first_lsf_host(environ) if launcher == "LSF" else None
            return ClusterEnvironment(
                launcher, rank, size, local_rank, local_size, rank // max(1, local_size), host
            )
    return None


def _first_lsf_host(environ: Mapping[str, str]) -> str | None:
    """Return rank 0's host: the first compute node in LSF's rank file, whose first line is the launch node."""
    path = Path(environ.get("LSB_DJOB_RANKFILE", ""))
    hosts = list(dict.fromkeys(path.read_text().split())) if path.is_file() else []
    return hosts[1] if len(hosts) > 1 else None


def _by_hand(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read ``WORLD_SIZE`` and ``LOCAL_RANK``, set by the user, and ``RANK``, ``LOCAL_WORLD_SIZE`` or ``NODE_RANK`` if they matter."""
    found = _numbers(environ, "WORLD_SIZE", "LOCAL_RANK")
    if found is None:
        return None
    size, local_rank = found
    node = (_numbers(environ, "NODE_RANK") or [0])[0]
    rank = _numbers(environ, "RANK")
    local_size = _numbers(environ, "LOCAL_WORLD_SIZE")
    if local_size is None and node and not rank:
        raise UsageError(
            f"NODE_RANK={node}: how many processes a node holds is not known. Fix: set RANK or LOCAL_WORLD_SIZE too"
        )
    if local_size is None:
        # Without it, nodes must hold equal numbers of processes: the rank gives the number, or all are on one node.
        local_size = [(rank[0] - local_rank) // node] if rank and node else [size]
    return ClusterEnvironment(
        "environment",
        rank[0] if rank else node * local_size[0] + local_rank,
        size,
        local_rank,
        local_size[0],
        node,
    )


def _with_address(place: ClusterEnvironment, environ: Mapping[str, str]) -> ClusterEnvironment:
    """Fill in where rank 0's store is."""
    address = environ.get("MASTER_ADDR") or place.master_addr
    if address is None:
        if place.nodes > 1 and place.launcher == "horovodrun":
            return place  # Horovod brings its ranks together itself
        if place.nodes > 1:
            raise UsageError(
                f"{place.launcher} started {place.size} processes on {place.nodes} nodes, and none knows where rank 0 is. "
                "Fix: set MASTER_ADDR"
            )
        address = "127.0.0.1"
    port = _numbers(environ, "MASTER_PORT")
    # Every rank derives the same port from the job's identity; MASTER_PORT is for the case that it is taken.
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if port is None and job is None and place.nodes > 1:
        raise UsageError(
            f"{place.launcher} names no job from which {place.nodes} nodes could derive a port. Fix: set MASTER_PORT"
        )
    return replace(
        place,
        master_addr=address,
        master_port=port[0]
        if port
        else 20000 + zlib.crc32((job or str(os.getppid())).encode()) % 20000,
    )
