"""The rank of this process and rank 0's address, from launchers' variables."""

import os
from importlib.metadata import entry_points

import pytest

from geartrain import UsageError
from geartrain.plugin_api import detect
from geartrain_parallel.nodes import with_address

SBATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
    "MASTER_ADDR": "a",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LSF = {
    "LSB_JOBID": "12",
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


def place_of(environ):
    return with_address(detect(environ), environ)


def numbers(place):
    return place.rank, place.size, place.local_rank, place.local_size, place.node_rank


@pytest.mark.parametrize(
    ("environ", "launcher", "expected", "address"),
    [
        (SRUN, "SLURM", (6, 8, 2, 4, 1), "gpu07"),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2, 1), "a"),
        (MPICH, "MPICH", (1, 2, 1, 2, 0), "127.0.0.1"),
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1), "node0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_places(environ, launcher, expected, address):
    place = place_of(environ)
    assert (place.launcher, numbers(place), place.master_addr) == (launcher, expected, address)


def test_a_launcher_is_imported_only_if_its_variable_is_set():
    found = entry_points(group="geartrain.launchers")
    for environ in (SRUN, OPEN_MPI, MPICH, LSF):
        assert sum(point.name in environ for point in found) == 1


@pytest.mark.parametrize("job", ["bash", "interactive"])
def test_a_program_that_srun_starts_inside_an_interactive_job_is_a_rank(job):
    """The step has the job's name, and the task is this very process."""
    environ = {**SRUN, "SLURM_JOB_NAME": job, "SLURM_TASK_PID": str(os.getpid())}
    assert numbers(detect(environ)) == (6, 8, 2, 4, 1)
    with pytest.warns(
        UserWarning,
        match=f"task 6 of 8 .* called '{job}' is taken for a shell. Fix: srun --job-name=NAME",
    ):
        assert (
            detect({**environ, "SLURM_TASK_PID": "1"}) is None
        )  # a script in between, or a shell in the background
    assert detect({**environ, "SLURM_JOB_NAME": "bash-training", "SLURM_TASK_PID": "1"}).rank == 6


@pytest.mark.parametrize(
    "environ",
    [
        SBATCH,
        {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "bash"},
        {
            **SRUN,
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NAME": "interactive",
            "SLURM_TASK_PID": "1",
        },
    ],
    ids=[
        "a batch script",
        "an interactive step",
        "a shell of eight tasks",
        "an interactive step of eight tasks",
    ],
)
def test_no_place(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("login,gpu[1-2]", "login"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("gpu[1,3]-ib", "gpu1-ib"),
        ("n1.example.org", "n1.example.org"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert place_of({**SRUN, "SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_ranks_of_a_job_derive_the_same_port():
    first = place_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert place_of(SRUN).master_port == first.master_port
    assert place_of({**SRUN, "SLURM_JOB_ID": "78"}).master_port != first.master_port
    assert 1024 < first.master_port < 65536


def test_a_given_port_is_used():
    assert place_of(TORCHRUN).master_port == 29400


def test_lsf_reads_the_rank_file(tmp_path):
    path = tmp_path / "ranks"
    path.write_text("launch\nc1\nc1\nc2\nc2\n")
    place = place_of({**LSF, "LSB_DJOB_RANKFILE": str(path)})
    assert (place.launcher, numbers(place), place.master_addr) == ("LSF", (2, 4, 0, 2, 1), "c1")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**MPICH, "MPI_LOCALNRANKS": "0"}, ("MPICH", "of 0")),
        ({**LSF, "LSB_DJOB_RANKFILE": ""}, ("LSF", "2 nodes", "MASTER_ADDR")),
        (
            {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"},
            ("Open MPI", "2 nodes", "MASTER_ADDR"),
        ),
        ({**MPICH, "PMI_SIZE": "4", "MASTER_ADDR": "a"}, ("MPICH", "2 nodes", "MASTER_PORT")),
    ],
)
def test_contradictions_are_refused(environ, words):
    with pytest.raises(UsageError) as caught:
        place_of(environ)
    for word in words:
        assert word in str(caught.value)
