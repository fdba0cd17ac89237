"""``geartrain doctor`` says how Horovod was built, and what is missing."""

import json
import os
import subprocess
import sys

import pytest

from geartrain.commands import doctor_software
from geartrain.commands.doctor_findings import examine
from geartrain.registry import Registry
from geartrain_horovod.installed import missing, torch_version

needs_horovod = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@needs_horovod
def test_how_it_was_built():
    section = examine("plugins", doctor_software.plugins, Registry())
    (row,) = [row for row in section.facts["plugins"] if row["name"] == "horovod"]
    facts = row["diagnosis"]["facts"]
    assert facts["horovod"] == "0.28.1"
    assert facts["built_for_torch"] == facts["torch"] == torch_version()
    assert facts["gloo"] is True
    assert {facts["mpi"], facts["nccl"], facts["cuda"]} <= {True, False}
    assert [finding.what for finding in section.findings if "horovod" in finding.what] == []


def test_what_is_missing_is_shown_with_the_command_that_helps(tmp_path):
    folder = tmp_path / "horovod" / "torch"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "mpi_lib_v2.so").touch()
    (folder.parent / "metadata.json").write_text(json.dumps({"pytorch": "1.13.1"}))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "300"}
    command = [sys.executable, "-c", "import sys; from geartrain.commands import main; sys.exit(main(['doctor']))"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    ending = done.stdout.partition("what may matter")[2]
    assert f"was built for torch 1.13.1, and torch {torch_version()} is installed" in ending
    assert "Fix: python -m geartrain_horovod.install (" in ending
    assert "│ built_for_torch │ 1.13.1" in done.stdout
