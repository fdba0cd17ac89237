"""Ranks use the GPUs that their starting process has found."""

import json
import os
import sys

import pytest
import torch
from several_ranks import program_results
from small_models import fit

from geartrain_cuda import agree, find_usable_cuda_devices

from .fake_pynvml import FakeGPU, FakeNVML

_TAKEN = {"processes": [(1, None)]}


def find_or_error(n):
    try:
        return find_usable_cuda_devices(n)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def choose_on_a_rank():
    """Train on two ranks; in rank 1, NVML shows that rank 0 occupies the first GPU."""
    rank = int(os.environ.get("RANK", "0"))
    torch.version.cuda = "13.0"
    gpus = [FakeGPU(f"GPU-{i}", **(_TAKEN if i < rank else {})) for i in range(3)]
    sys.modules["pynvml"] = FakeNVML(*gpus)
    answers = [find_or_error(n) for n in (2, 1, 9, 0)]
    for _ in range(2):
        answers.append(find_or_error(2))
        fit(strategy="ddp", devices=2)
        gpus[1].processes = [(1, None)]  # from now on, NVML changes for rank 0 too
    return [*answers, find_or_error(3)]


@pytest.mark.end_to_end  # the tests below make the same calls in one process
def test_ranks_of_ddp_get_the_answers_of_the_first_process(tmp_path):
    first, second = program_results(tmp_path, choose_on_a_rank)
    assert first == second
    assert first[:2] == [[0, 1], [0]]
    assert first[2].startswith("ValueError: find_usable_cuda_devices(9): only 3")
    assert first[3:6] == [[], [0, 1], [0, 1]]
    assert first[6].startswith("RuntimeError")
    assert "before the first fit" in first[6]


def place(monkeypatch, launcher, local_rank=0, local_size=2, **record):
    variables = dict.fromkeys(("RANK", "LOCAL_RANK"), local_rank)
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), local_size)
    variables |= {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, **launcher}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    if record:
        monkeypatch.setenv(agree.RECORD, json.dumps(record))


def ours():
    return {"GEARTRAIN_STARTED_BY": os.getpid()}


@pytest.mark.parametrize("launcher", [{"TORCHELASTIC_RUN_ID": "x"}, {}])
def test_ranks_of_another_launcher_must_not_choose(machine, monkeypatch, launcher):
    machine(4)
    place(monkeypatch, launcher)
    message = r"started 2 processes on this node.*Fix: devices=\[...\], or set CUDA_VISIBLE_DEVICES"
    with pytest.raises(RuntimeError, match=message):
        find_usable_cuda_devices(2)
    assert find_usable_cuda_devices(0) == []


def test_a_single_rank_of_a_node_may_choose(machine, monkeypatch):
    machine(FakeGPU("GPU-a", **_TAKEN), FakeGPU("GPU-b"))
    place(monkeypatch, {"TORCHELASTIC_RUN_ID": "x"}, local_size=1)
    assert find_usable_cuda_devices(1) == [1]


def test_a_rank_repeats_the_answers_in_order(machine, monkeypatch):
    fake = machine(1)
    calls = [
        {"n": 2, "devices": [4, 5]},
        {"n": 2, "error": "too few", "kind": "RuntimeError"},
        {"n": 1, "devices": [7]},
    ]
    place(monkeypatch, ours(), local_rank=1, pid=os.getppid(), calls=calls)
    assert find_usable_cuda_devices(2) == [4, 5]
    with pytest.raises(RuntimeError, match="too few"):
        find_usable_cuda_devices(2)
    assert find_usable_cuda_devices(1) == [7]
    assert find_usable_cuda_devices(2) == [4, 5]  # after the last recorded call
    assert fake.calls == []


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_call_after_the_start_returns_the_newest_answer(machine, monkeypatch, local_rank):
    fake = machine(1)
    calls = [
        {"n": 2, "devices": [4, 5]},
        {"n": 2, "devices": [6, 7]},
        {"n": 2, "error": "too few", "kind": "RuntimeError"},
    ]
    pid = os.getppid() if local_rank else os.getpid()
    place(monkeypatch, ours(), local_rank=local_rank, pid=pid, calls=calls)
    monkeypatch.setattr(agree, "_calls", 3)
    assert find_usable_cuda_devices(2) == [6, 7]
    assert fake.calls == []


def test_a_rank_with_another_call_gets_an_error(machine, monkeypatch):
    machine(4)
    place(monkeypatch, ours(), local_rank=1, pid=os.getppid(), calls=[{"n": 2, "devices": [0, 1]}])
    message = "call 1 of find_usable_cuda_devices asks for 3 in this rank, and asked for 2"
    with pytest.raises(RuntimeError, match=message):
        find_usable_cuda_devices(3)


@pytest.mark.parametrize(
    "record", ["", "nonsense", "[]", "{}", '{"pid": 1, "calls": [{"n": 2, "devices": [0, 1]}]}']
)
def test_a_record_of_another_program_is_ignored(machine, monkeypatch, record):
    machine(4)
    monkeypatch.setenv(agree.RECORD, record)
    assert find_usable_cuda_devices(2) == [0, 1]
    calls = [{"n": 2, "devices": [0, 1]}]
    assert json.loads(os.environ[agree.RECORD]) == {"pid": os.getpid(), "calls": calls}
    place(monkeypatch, ours(), local_rank=1)
    monkeypatch.setenv(agree.RECORD, record)
    with pytest.raises(RuntimeError, match="after the ranks were started"):
        find_usable_cuda_devices(2)


def test_a_call_with_an_invalid_number_is_not_recorded(machine, monkeypatch):
    machine(4)
    with pytest.raises(ValueError):
        find_usable_cuda_devices("2")
    assert agree.RECORD not in os.environ
