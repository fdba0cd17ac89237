"""``geartrain doctor`` shows how Horovod was built, and what is missing."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from geartrain import UsageError
from geartrain.planning.registry import Registry
from geartrain_horovod import checks, installed
from geartrain_horovod.installed import torch_version
from geartrain_tools.doctor import software as doctor_software
from geartrain_tools.doctor.findings import examine

needs_horovod = pytest.mark.horovod


@needs_horovod
def test_doctor_shows_how_horovod_was_built():
    section = examine("plugins", doctor_software.plugins, Registry())
    (row,) = [row for row in section.facts["plugins"] if row["name"] == "horovod"]
    facts = row["diagnosis"]["facts"]
    assert facts["horovod"] == "0.28.1"
    assert facts["built_for_torch"] == facts["torch"] == torch_version()
    assert facts["gloo"] is True
    # Functions that the library calls.
    (library,) = (Path(find_spec("horovod").origin).parent / "torch").glob("mpi_lib_v2*")
    calls = {
        "mpi": b"MPI_Init_thread",
        "nccl": b"ncclAllReduce",
        "cuda": b"cudaStreamCreateWithPriority",
    }
    assert {name: facts[name] for name in calls} == {
        name: function in library.read_bytes() for name, function in calls.items()
    }
    assert [finding.what for finding in section.findings if "horovod" in finding.what] == []


@needs_horovod
@pytest.mark.parametrize(
    ("nccl", "words"),
    [(False, ["has a GPU", "built without NCCL", "refused on cuda", "--nccl"]), (True, [])],
)
def test_doctor_and_strategy_require_nccl_for_a_gpu(monkeypatch, nccl, words):
    """The strategy also refuses a build with CUDA and without NCCL."""
    import horovod.torch as hvd

    monkeypatch.setattr(installed, "_has_cuda", lambda: True)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
    problems = installed.diagnose()["problems"]
    assert len(problems) == bool(words)
    assert all(word in problems[0] for word in words)
    plan = SimpleNamespace(
        accelerator=SimpleNamespace(name="cuda"),
        processes=2,
        strategy=SimpleNamespace(label="LABEL"),
    )
    with (
        pytest.raises(
            UsageError, match="LABEL: this Horovod was built without NCCL, which GPUs need"
        )
        if words
        else nullcontext()
    ):
        checks.check_here(plan, "average", None)


@pytest.mark.end_to_end
def test_doctor_shows_a_build_for_another_torch_with_the_fix(tmp_path):
    folder = tmp_path / "horovod" / "torch"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "mpi_lib_v2.so").touch()
    (folder.parent / "metadata.json").write_text(json.dumps({"pytorch": "1.13.1"}))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "300"}
    command = [
        sys.executable,
        "-c",
        "import sys; from geartrain.commands import main; sys.exit(main(['doctor']))",
    ]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    ending = done.stdout.partition("what may matter")[2]
    assert f"was built for torch 1.13.1, and torch {torch_version()} is installed" in ending
    assert "Fix: python -m geartrain_horovod.install (" in ending
    assert "  built_for_torch  1.13.1" in done.stdout
