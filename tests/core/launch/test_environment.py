"""The launcher and the rank of this process, from the variables of every launcher."""

import os

import pytest

from geartrain import UsageError
from geartrain.launch.cluster import STARTED_BY, ClusterEnvironment, detect


def environ(text):
    """Return the variables of ``NAME=value`` words, as ``env`` takes them."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = environ("""
    TORCHELASTIC_RUN_ID=none RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4
    GROUP_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29400
""")
SBATCH = environ("""
    SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
    SLURM_NNODES=2
""")
SRUN = SBATCH | environ("""
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_NODEID=1
    SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=gpu[07-09,12]
""")
OPEN_MPI = environ("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-1 MASTER_ADDR=a
""")
MPICH = environ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
HOROVODRUN = environ("""
    HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2
    HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1
    HOROVOD_GLOO_RENDEZVOUS_PORT=4242
""")
LSF = environ("""
    LSB_JOBID=12 JSM_NAMESPACE_RANK=2 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=0
    JSM_NAMESPACE_LOCAL_SIZE=2
""")
BY_HAND = environ("MASTER_ADDR=localhost MASTER_PORT=12910 WORLD_SIZE=3 NODE_RANK=0 LOCAL_RANK=2")
SECOND_NODE = environ("WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=a MASTER_PORT=1")


def numbers(place: ClusterEnvironment) -> tuple[int, ...]:
    return place.rank, place.size, place.local_rank, place.local_size, place.node_rank


@pytest.mark.parametrize(
    ("environ", "launcher", "expected", "address"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1), "node0"),
        ({**TORCHRUN, STARTED_BY: str(os.getpid())}, "geartrain", (5, 8, 1, 4, 1), "node0"),
        (SRUN, "SLURM", (6, 8, 2, 4, 1), "gpu07"),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2, 1), "a"),
        (MPICH, "MPICH", (1, 2, 1, 2, 0), "127.0.0.1"),
        (HOROVODRUN, "horovodrun", (3, 4, 1, 2, 1), None),
        (
            {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "0"},
            "horovodrun",
            (3, 4, 1, 4, 0),
            "127.0.0.1",
        ),
        (
            {**HOROVODRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "horovodrun",
            (3, 4, 1, 2, 1),
            "a",
        ),
        (BY_HAND, "environment", (2, 3, 2, 3, 0), "localhost"),
        ({**SECOND_NODE, "RANK": "3"}, "environment", (3, 4, 1, 2, 1), "a"),
        ({**SECOND_NODE, "LOCAL_WORLD_SIZE": "2"}, "environment", (3, 4, 1, 2, 1), "a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_places(environ, launcher, expected, address):
    place = detect(environ)
    assert place.launcher == launcher
    assert numbers(place) == expected
    assert place.master_addr == address
    if "MASTER_PORT" in environ:
        assert place.master_port == int(environ["MASTER_PORT"])


def test_a_program_that_srun_starts_inside_an_interactive_job_is_a_rank():
    """The step has the job's name, and the task is this very process."""
    job = "interactive"
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
        {},
        SBATCH,
        {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "bash"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "a"},
        {**TORCHRUN, STARTED_BY: str(os.getpid() + 1)},
        {**BY_HAND, STARTED_BY: "1"},
    ],
    ids=[
        *("nothing", "a batch script", "an interactive step", "a shell of eight tasks"),
        *("no local rank", "inside a rank", "inside a rank by hand"),
    ],
)
def test_no_place(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("login,gpu[1-2]", "login"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("gpu[1,3]-ib", "gpu1-ib"),
        ("n1.example.org", "n1.example.org"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert detect({**SRUN, "SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_ranks_of_a_job_derive_the_same_port():
    first = detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert detect(SRUN).master_port == first.master_port
    assert detect({**SRUN, "SLURM_JOB_ID": "78"}).master_port != first.master_port
    assert 1024 < first.master_port < 65536


def test_ranks_of_horovodrun_agree_on_a_port_though_each_has_another_parent():
    here = {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "4"}
    port = detect(here).master_port
    assert detect({**here, "HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}).master_port == port
    assert detect({**here, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4243"}).master_port != port


def test_lsf_reads_the_rank_file(tmp_path):
    path = tmp_path / "ranks"
    path.write_text("launch\nc1\nc1\nc2\nc2\n")
    place = detect({**LSF, "LSB_DJOB_RANKFILE": str(path)})
    assert (place.launcher, numbers(place), place.master_addr) == ("LSF", (2, 4, 0, 2, 1), "c1")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, ("torchrun", "rank 8 of 8")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ("torchrun", "local rank 4 of 4")),
        ({**BY_HAND, "LOCAL_RANK": "3"}, ("rank 3 of 3",)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0", "GROUP_RANK": ""}, ("local rank 1 of 0",)),
        ({**MPICH, "MPI_LOCALNRANKS": "0"}, ("MPICH", "of 0")),
        ({**LSF, "LSB_DJOB_RANKFILE": ""}, ("LSF", "2 nodes", "MASTER_ADDR")),
        (
            {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"},
            ("Open MPI", "2 nodes", "MASTER_ADDR"),
        ),
        ({**MPICH, "PMI_SIZE": "4", "MASTER_ADDR": "a"}, ("MPICH", "2 nodes", "MASTER_PORT")),
        (
            {**BY_HAND, "NODE_RANK": "1", "LOCAL_RANK": "0"},
            ("NODE_RANK=1", "RANK", "LOCAL_WORLD_SIZE"),
        ),
    ],
)
def test_contradictions_are_refused(environ, words):
    with pytest.raises(UsageError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)
