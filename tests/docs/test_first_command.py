"""README's "Try it", as a new user runs it: in one shell, with requirements.txt alone."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from geartrain.errors.known import KNOWN

from . import blocks

ROOT = Path(__file__).parents[2]
#: The pages whose commands need nothing but requirements.txt.
PAGES = ("README.md", "docs/start.md", "docs/tutorial.md")
#: Seconds for the command on a busy machine. With pip's cache it takes about 70 on an idle one.
DEADLINE = 500


def _commands(page):
    return [
        command
        for block in blocks.read_blocks(ROOT / page)
        if block.language == "console"
        for command in blocks.commands(block)
    ]


def test_requirements_have_each_command_strategy_and_plugin_of_the_first_pages():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    installed = {
        tomllib.loads((ROOT / line[3:] / "pyproject.toml").read_text())["project"]["name"]
        for line in lines
        if line.startswith("-e ")
    }
    for page in PAGES:
        typed = "\n".join(command.typed for command in _commands(page))
        used = {
            *(("command", name) for name in re.findall(r"\bgeartrain (\w+)", typed)),
            *(("strategy", name) for name in re.findall(r"--strategy (\w+)", typed)),
            *(("plugin", name) for name in re.findall(r"--plugin (\w+)", typed)),
        }
        assert ("command", "fit") in used
        needed = {KNOWN[use] for use in used if use in KNOWN}
        assert needed <= installed, f"{page} needs more than requirements.txt"


@pytest.mark.build
@pytest.mark.timeout(DEADLINE + 30)
def test_the_first_command_and_those_after_it_work_in_one_shell(tmp_path):
    copy = tmp_path / "geartrain"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs")
    shutil.copytree(ROOT, copy, ignore=ignored)
    first, *others = [
        command.typed for command in _commands("README.md") if "tox" not in command.typed
    ][1:]
    assert first.startswith("python3 -m venv .venv")
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join([first, *others])],
        cwd=copy,
        # pip's settings, such as a proxy, are the machine's; tox's constraints would hide our own.
        env={k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"val_acc\W+0\.9[7-9]", done.stdout), done.stdout
    assert "saved in runs/digits-1\n" in done.stdout, done.stdout
    assert "report: runs/report.html (1 run" in done.stdout, done.stdout
    assert "2 passed" in done.stdout, done.stdout
