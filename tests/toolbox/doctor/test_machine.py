"""The doctor's checks of disk, memory, limits, host names and the environment."""

import os
import shutil
import socket
import threading
from types import SimpleNamespace

import pytest

from geartrain_tools.doctor import machine as doctor_machine, network as doctor_network
from geartrain_tools.doctor.findings import examine

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    for name in (*doctor_network.LAUNCHER, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    """``machine()``: return the section. Disks have free space unless the test changes it."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=9000 * MIB, free=8000 * MIB)
    )
    return lambda: examine("machine", doctor_machine.machine)


@pytest.fixture
def network():
    return lambda: examine("network", doctor_network.network)


def said(section, must, word):
    return [
        (finding.what, finding.fix)
        for finding in section.findings
        if finding.must is must and word in finding.what
    ]


def shared_memory(monkeypatch, size, free):
    real = os.statvfs
    fake = SimpleNamespace(f_blocks=size * MIB // 4096, f_bavail=free * MIB // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: fake if path == "/dev/shm" else real(path))
    monkeypatch.setattr(
        os.path, "isdir", lambda path, real=os.path.isdir: path == "/dev/shm" or real(path)
    )


# --- machine --------------------------------------------------------------------------------------


def test_a_full_disk(machine, monkeypatch, folder):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=9000 * MIB, free=1023 * MIB)
    )
    section = machine()
    assert section.facts["disk"]["current folder"] == {
        "path": str(folder),
        "free_mib": 1023,
        "total_mib": 9000,
    }
    current, temporary = said(section, True, "folder")
    assert current[0] == f"the current folder ({folder}) has 1023 MiB free"
    assert "--output" in current[1]
    assert "TMPDIR" in temporary[1]


def test_docker_s_shared_memory_is_too_small(machine, monkeypatch):
    shared_memory(monkeypatch, 64, 64)
    section = machine()
    assert section.facts["shared_memory"] == {"path": "/dev/shm", "free_mib": 64, "total_mib": 64}
    ((what, fix),) = said(section, True, "/dev/shm")
    assert "has 64 MiB" in what
    assert "--shm-size" in fix


def test_full_shared_memory(machine, monkeypatch):
    shared_memory(monkeypatch, 8000, 10)
    ((what, _),) = said(machine(), True, "/dev/shm")
    assert what == "/dev/shm has 10 MiB free of 8000"


def test_enough_disk_and_shared_memory(machine, monkeypatch):
    shared_memory(monkeypatch, 65, 65)
    section = machine()
    assert said(section, True, "/dev/shm") == said(section, True, "folder") == []


@pytest.mark.parametrize(
    ("threads", "must"),
    [("many", True), ("0", True), ("2,x", True), ("100000", False)],
)
def test_threads_that_do_not_fit(machine, monkeypatch, threads, must):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    section = machine()
    assert section.facts["processors"]["omp_num_threads"] == threads
    ((what, fix),) = said(section, must, "OMP_NUM_THREADS")
    assert threads in what
    assert "export OMP_NUM_THREADS=" in fix


@pytest.mark.parametrize(
    ("threads", "warned"), [("2", False), ("2,1", False), ("2, 100000", False), ("100000,1", True)]
)
def test_threads_may_be_a_list_a_number_for_each_level(machine, monkeypatch, threads, warned):
    monkeypatch.setattr(doctor_machine, "_cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    section = machine()
    assert said(section, True, "OMP_NUM_THREADS") == []
    assert bool(said(section, False, f"OMP_NUM_THREADS={threads}")) is warned


def control_group(monkeypatch, tmp_path, **files):
    """Put this process into a fake control group with these files."""
    monkeypatch.setattr(doctor_machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(doctor_machine, "_PROC", tmp_path / "proc")
    for path, text in {
        "proc/self/cgroup": "0::/job/7\n",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n",
        **{
            f"cgroup/{name.replace('__', '/').replace('-', '.')}": text
            for name, text in files.items()
        },
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)


@pytest.mark.parametrize(
    "files",
    [
        {
            "job__7__cpu-max": "50000 100000\n",
            "job__7__memory-max": str(4096 * MIB),
            "job__7__memory-current": str(3584 * MIB),
        },
        {
            "cpu-max": "50000 100000\n",
            "memory-max": str(4096 * MIB),
            "memory-current": str(3584 * MIB),
        },
        {
            "cpu__cpu-cfs_quota_us": "50000",
            "cpu__cpu-cfs_period_us": "100000",
            "memory__memory-limit_in_bytes": str(4096 * MIB),
            "memory__memory-usage_in_bytes": str(3584 * MIB),
        },
    ],
    ids=["process's group", "container's group", "version 1"],
)
def test_a_container_s_limits(machine, monkeypatch, tmp_path, files):
    control_group(monkeypatch, tmp_path, **files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    section = machine()
    assert section.error is None
    assert section.facts["processors"]["cgroup"] == 0.5
    assert section.facts["memory"] == {
        "total_mib": 16384,
        "available_mib": 8192,
        "cgroup_mib": 4096,
        "cgroup_free_mib": 512,
    }
    ((what, fix),) = said(section, False, "processor")
    assert "may use 0.5 processor(s) and sees 8" in what
    assert fix == "export OMP_NUM_THREADS=1"
    assert said(section, False, "512 MiB of memory")


def test_page_cache_that_would_be_given_back_counts_as_free(machine, monkeypatch, tmp_path):
    limits = {
        "job__7__memory-max": str(4096 * MIB),
        "job__7__memory-current": str(3584 * MIB),
        "job__7__memory-stat": f"anon {512 * MIB}\nfile {3072 * MIB}\n"
        f"inactive_file {3000 * MIB}\nactive_file {72 * MIB}\n",
    }
    control_group(monkeypatch, tmp_path, **limits)
    section = machine()
    assert (section.facts["memory"]["cgroup_mib"], section.facts["memory"]["cgroup_free_mib"]) == (
        4096,
        3512,
    )
    assert said(section, False, "memory") == []


def test_page_cache_in_version_1_counts_that_of_the_groups_within(machine, monkeypatch, tmp_path):
    limits = {"limit_in_bytes": str(4096 * MIB), "usage_in_bytes": str(3584 * MIB)}
    limits["stat"] = f"inactive_file 0\ntotal_inactive_file {3000 * MIB}\n"
    control_group(
        monkeypatch, tmp_path, **{f"memory__memory-{name}": text for name, text in limits.items()}
    )
    assert machine().facts["memory"]["cgroup_free_mib"] == 3512


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_the_groups_around_this_process_counts(
    machine, monkeypatch, tmp_path, version
):
    """As in SLURM, which limits the job, not the task inside it."""

    def limits(group, limit, used, quota):
        if version == 2:
            return {
                f"{group}memory-max": limit if limit == "max" else str(int(limit) * MIB),
                f"{group}memory-current": str(used * MIB),
                f"{group}cpu-max": f"{quota} 100000\n",
            }
        return {
            f"memory__{group}memory-limit_in_bytes": "9223372036854771712"
            if limit == "max"
            else str(int(limit) * MIB),
            f"memory__{group}memory-usage_in_bytes": str(used * MIB),
            f"cpu__{group}cpu-cfs_quota_us": "-1" if quota == "max" else quota,
            f"cpu__{group}cpu-cfs_period_us": "100000",
        }

    groups = {
        **limits("job__step__task__", "max", 100, "max"),
        **limits("job__step__", "4096", 100, "300000"),
        **limits("job__", "8192", 7680, "150000"),
        **limits("", "max", 9000, "max"),
    }
    control_group(monkeypatch, tmp_path, **groups)
    v1 = "4:memory:/job/step/task\n5:cpu,cpuacct:/job/step/task\n0::/\n"
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step/task\n" if version == 2 else v1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    section = machine()
    assert section.error is None
    assert section.facts["processors"]["cgroup"] == 1.5
    assert (section.facts["memory"]["cgroup_mib"], section.facts["memory"]["cgroup_free_mib"]) == (
        4096,
        512,
    )


def test_no_limits(machine, monkeypatch, tmp_path):
    control_group(
        monkeypatch, tmp_path, **{"job__7__cpu-max": "max 100000", "job__7__memory-max": "max"}
    )
    section = machine()
    assert section.facts["processors"]["cgroup"] is None
    assert section.facts["memory"]["cgroup_mib"] is None
    assert said(section, False, "memory") == said(section, False, "processor") == []


def test_few_open_files(machine):
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        section = machine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert section.facts["open_files"]["soft"] == 512
    ((_, fix),) = said(section, False, "512 files")
    assert fix.startswith("ulimit -n ")


# --- network --------------------------------------------------------------------------------------


def test_loopback_really_carries_something(network):
    section = network()
    assert section.facts["loopback"]["error"] is None
    with socket.socket() as probe:  # the listener is closed
        assert probe.connect_ex(("127.0.0.1", section.facts["loopback"]["port"])) != 0


def test_names(network, monkeypatch):
    def resolve(name, *rest, **more):
        if name == "localhost":
            return [(None, None, None, "", ("10.1.2.3", 0))]
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "lonely")
    section = network()
    assert section.facts["hostname_addresses"] == "Name or service not known"
    ((what, fix),) = said(section, True, "localhost")
    assert "resolves to 10.1.2.3" in what
    assert "/etc/hosts" in fix
    ((what, _),) = said(section, False, "lonely")
    assert "Several nodes need it" in what
    assert said(section, True, "lonely") == []


def test_a_host_name_that_is_too_long_for_any_name_server(network, monkeypatch, capfd):
    name = "a" * 64  # Linux allows 64 characters; DNS allows 63 between two dots
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    section = network()
    assert section.error is None
    ((what, fix),) = said(section, False, name)
    assert "no answer" not in what
    assert "label" in section.facts["hostname_addresses"]  # Python's error message
    assert "at most 63" in fix
    assert "Traceback" not in capfd.readouterr().err


def test_a_name_server_that_does_not_answer_does_not_stop_it(network, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: answer.wait(60) and [])
    monkeypatch.setattr(doctor_network, "_PATIENCE", 0.2)
    try:
        section = network()
    finally:
        answer.set()
    assert section.error is None
    assert said(section, True, "localhost does not resolve: no answer within 0.2 s")


def test_loopback_that_is_closed(network, monkeypatch):
    class Closed(socket.socket):
        def connect(self, address):
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "socket", Closed)
    section = network()
    ((what, fix),) = said(section, True, "127.0.0.1")
    assert "Connection refused" in what
    assert "lo" in fix
    assert section.facts["loopback_ipv6"]["error"] is not None  # a fact, not a problem


# --- environment ----------------------------------------------------------------------------------


def set_all(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_without_a_launcher(network):
    section = network()
    assert section.facts["launcher"] is None
    assert section.facts["launcher_variables"] == {}


def test_variables_that_are_left_make_a_run_wait(network, monkeypatch):
    set_all(monkeypatch, WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="10.0.0.1")
    section = network()
    assert section.facts["launcher"] == "environment"
    assert section.facts["launcher_variables"] == {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
    }
    ((what, fix),) = said(section, True, "rank 0 of 2")
    assert "would wait" in what
    assert fix.startswith("unset WORLD_SIZE LOCAL_RANK MASTER_ADDR")


def test_a_launcher_s_own_process_is_no_problem(network, monkeypatch):
    set_all(
        monkeypatch,
        TORCHELASTIC_RUN_ID="x",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        LOCAL_WORLD_SIZE="2",
    )
    section = network()
    assert section.facts["launcher"] == "torchrun"
    assert said(section, False, "torchrun says that this process is rank 1 of 2")
    assert said(section, True, "") == []


@pytest.mark.parametrize(
    "variables",
    [{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, {"RANK": "0", "WORLD_SIZE": "1"}],
)
def test_variables_that_mean_nothing_here_are_shown_alone(network, monkeypatch, variables):
    set_all(monkeypatch, **variables)
    section = network()
    assert section.facts["launcher_variables"] == variables
    assert said(section, True, "") == said(section, False, "launched") == []


def test_variables_that_contradict_each_other(network, monkeypatch):
    set_all(monkeypatch, WORLD_SIZE="2", LOCAL_RANK="5")
    ((what, fix),) = said(network(), True, "contradict each other")
    assert "local rank 5 of 2" in what
    assert "environment variables" in fix


def test_only_what_changes_a_run_is_shown_and_no_secret(monkeypatch):
    set_all(
        monkeypatch,
        NCCL_DEBUG="INFO",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_LOGS="x",
        GEARTRAIN_BLOCK="a",
        CUDA_VISIBLE_DEVICES="",
    )
    set_all(
        monkeypatch,
        WANDB_API_KEY="hush",
        HOME="/nowhere",
        GEARTRAIN_TOKEN="hush",
        OMP_NUM_THREADS="1",
    )
    facts = examine("environment", doctor_network.environment).facts["variables"]
    assert facts["NCCL_DEBUG"] == "INFO"
    assert facts["CUDA_VISIBLE_DEVICES"] == ""
    assert {"GLOO_SOCKET_IFNAME", "TORCH_LOGS", "GEARTRAIN_BLOCK", "OMP_NUM_THREADS"} <= set(facts)
    assert not {"WANDB_API_KEY", "HOME"} & set(facts)
    assert "hush" not in str(facts)
