"""tests/tools/gpu_check.py reports each part, whatever happens to it."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    spec = spec_from_file_location("gpu_check", Path(__file__).parents[1] / "tools/gpu_check.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_without_a_gpu_each_part_says_so(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "has_device", lambda device: False)
    assert tool.check(tool.PARTS, "cuda", tmp_path / "rows") == 0
    assert {row["result"] for row in rows(tmp_path / "rows")} == {"no GPU"}
    assert [row["part"] for row in rows(tmp_path / "rows")] == [part.name for part in tool.PARTS]
    assert capsys.readouterr().out.count("no GPU") == 1 + len(tool.PARTS)


def test_a_part_that_fails_or_is_late_does_not_end_the_others(tool, tmp_path, capsys):
    def part(name, code, seconds=60):
        return tool.Part(name, "", ("-c", code), seconds)

    waits = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"
    waits = f"import os; r, w = os.pipe(); os.dup2(r, 0); {waits}"
    parts = [part("fails", "exit('wrong')"), part("waits", waits, 1), part("works", "print(7)")]
    assert tool.check(parts, "cpu", tmp_path / "rows") == 1
    found = rows(tmp_path / "rows")
    assert [row["result"] for row in found] == ["failed", "late", "passed"]
    assert found[2]["notes"] == ["7\n"]
    assert "wrong" in capsys.readouterr().err


def test_tests_are_counted(tool, tmp_path):
    file = tmp_path / "test_parts.py"
    file.write_text(
        "import pytest\npytestmark = pytest.mark.cuda\n"
        "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no card')\n"
    )
    row = tool.run(tool.suite("parts", "", 60, file=str(file)), "cpu")
    assert (row.result, row.passed, row.failed, row.skipped) == ("failed", 1, 1, 1)
    assert row.notes == ["test_b", "no card"]


def test_the_table_has_the_newest_row_of_each_gpu(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "cuda.md")
    tool.PAGE.write_text(f"before\n{tool.MARKS[0]}\nold\n{tool.MARKS[1]}\nafter\n")
    first = {"part": "steps", "result": "failed", "passed": 9, "accelerator": "cuda"}
    first |= {"device": "NVIDIA H100", "torch": "2.11.0", "day": "2026-11-28"}
    on_cpu = first | {"accelerator": "cpu", "device": "cpu"}
    second = first | {"result": "passed", "passed": 10}
    lines = map(json.dumps, [first, on_cpu, second])
    (tmp_path / "rows").write_text("\n".join(lines))
    tool.write_table(tmp_path / "rows")
    page = tool.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    (line,) = [line for line in page.splitlines() if line.startswith("| steps |")]
    assert line.endswith("| passed, 10 tests, torch 2.11.0, 2026-11-28 |")
    assert "not run" in page
    assert "old" not in page
