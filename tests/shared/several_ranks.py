"""Run a script of several ranks; each rank keeps its results in a file."""

from pathlib import Path
from types import SimpleNamespace

import torch

from geartrain.testing.launching import launched

PREAMBLE = """
import os
import sys
sys.path.insert(0, {here!r})
import torch
from torch import nn
from torch.utils.data import DataLoader
import geartrain as gt
from geartrain import hookimpl
from cases import *


def keep(trainer, **values):
    torch.save(values, f"kept-{{trainer.global_rank}}.pt")

"""


class Scripts:
    """Scripts that begin with the names of a folder's cases.py, and with ``keep(trainer, **values)``.

    Args:
        file: a module of the folder.
        more: lines at a script's beginning.
    """

    def __init__(self, file, more=""):
        self.preamble = PREAMBLE.format(here=str(Path(file).parent)) + more

    def script(self, folder, body, *arguments, timeout=100, **environment):
        """Run ``body`` after the preamble as train.py; what it printed and its exit status. Nothing outlives it."""
        (folder / "train.py").write_text(self.preamble + body, encoding="utf-8")
        with launched("train.py", *arguments, folder=folder, **environment) as run:
            return SimpleNamespace(returncode=run.wait(timeout), printed=run.out + run.err)

    def results(self, folder, body, ranks=2, timeout=100):
        """What each rank kept of a script that must succeed."""
        done = self.script(folder, body, timeout=timeout)
        assert done.returncode == 0, done.printed
        return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(ranks)]

    def failure(self, folder, body, timeout=100):
        """What a script printed that must fail, by itself and within the time."""
        done = self.script(folder, body, timeout=timeout)
        assert done.returncode != 0, done.printed
        return done.printed
