"""SLURM, Open MPI, MPICH and LSF: the place of this process, from their variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from geartrain.plugin_api import ClusterEnvironment, warn

_read_numbers = ClusterEnvironment.read_numbers

_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
#: MPI launcher -> its variables for rank, size, local rank and local size.
_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _NUMBERS),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "LSF": tuple(f"JSM_NAMESPACE_{name}" for name in _NUMBERS),
}
#: Variables with the name of an MPI job.
_JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "LSB_JOBID")


def slurm(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of a task of srun. A batch script has a job but no step, and is no rank.

    Source: https://slurm.schedmd.com/srun.html
    """
    found = _read_numbers(environ, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    size = _read_numbers(environ, "SLURM_STEP_NUM_TASKS") or _read_numbers(environ, "SLURM_NTASKS")
    if found is None or size is None or size[0] < 2 or _is_shell(environ, found[1], size[0]):
        return None
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    per_node = re.match(r"\d+", text)
    nodes = max(1, int(environ.get("SLURM_NNODES", "1")))
    local_size = int(per_node[0]) if per_node else size[0] // nodes
    _, rank, local_rank, node_rank = found
    host = _first_host(environ)
    job = environ.get("SLURM_JOB_ID")
    return ClusterEnvironment(
        "SLURM", rank, size[0], local_rank, local_size, node_rank, host, job=job
    )


def _is_shell(environ: Mapping[str, str], task: int, tasks: int) -> bool:
    """True if a step is a shell, by its name as in Lightning.

    In an interactive job ranks have this name too: then SLURM_TASK_PID is this process.
    """
    job = environ.get("SLURM_JOB_NAME")
    if job not in ("bash", "interactive") or environ.get("SLURM_TASK_PID") == str(os.getpid()):
        return False
    if task > 0:  # a shell has one task
        warn(
            f"this is task {task} of {tasks} of a SLURM step, and trains alone: a job that is "
            f"called {job!r} is taken for a shell. Fix: srun --job-name=NAME"
        )
    return True


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first name in SLURM's compressed list: ``gpu[07-09,12],login`` -> ``gpu07``."""
    text = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else None


def mpi(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read an MPI launcher's variables. Nodes are assumed to have equally many ranks."""
    for launcher, names in _MPI.items():
        found = _read_numbers(environ, *names)
        if found is not None and found[1] > 1:
            rank, size, local_rank, local_size = found
            host = _first_lsf_host(environ) if launcher == "LSF" else None
            node = rank // max(1, local_size)
            job = next((environ[name] for name in _JOBS if name in environ), None)
            return ClusterEnvironment(
                launcher, rank, size, local_rank, local_size, node, host, job=job
            )
    return None


def _first_lsf_host(environ: Mapping[str, str]) -> str | None:
    """Return rank 0's host: the second name in LSF's rank file, after the launch node."""
    path = Path(environ.get("LSB_DJOB_RANKFILE", ""))
    hosts = list(dict.fromkeys(path.read_text().split())) if path.is_file() else []
    return hosts[1] if len(hosts) > 1 else None
