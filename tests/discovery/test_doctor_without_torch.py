"""`geartrain doctor` without torch: the tox environment `discovery`."""

import json
import os
import subprocess
import sys

import pytest

DOCTOR = (
    "import sys; from geartrain.commands import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
)


@pytest.mark.skipif(
    os.environ.get("GEARTRAIN_TEST_WITHOUT_TORCH") != "1",
    reason="needs an environment without torch: tox run -e discovery",
)
def test_doctor_reports_missing_torch_and_makes_the_other_checks():
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [
        problem["fix"]
        for problem in found["problems"]
        if problem["what"] == "torch is not installed"
    ]
    assert not [
        problem for problem in found["problems"] if "could not be imported" in problem["what"]
    ]
    assert found["failed"] == {}
    assert found["network"]["loopback"]["error"] is None
    named = subprocess.run(
        [sys.executable, "-c", DOCTOR, "--json", "--backend", "gloo"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in named.stderr
    assert json.loads(named.stdout)["problems"] == found["problems"]
    shown = subprocess.run(
        [sys.executable, "-c", DOCTOR], capture_output=True, text=True, timeout=60
    )
    assert "torch is not installed" in shown.stdout
    assert "Traceback" not in shown.stderr
