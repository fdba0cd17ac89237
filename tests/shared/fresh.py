"""Run a program in a new process."""

import os
import subprocess
import sys
from pathlib import Path


def words_of(program):
    """Run Python code that may import modules of this folder; return the words that it prints."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()
