"""Run a script of several ranks; each rank keeps its results in a file."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .launched import launched

PREAMBLE = f"""
import os
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from torch import nn
from torch.utils.data import DataLoader
import geartrain as gt
from geartrain import hookimpl
from geartrain.strategies import BaguaStrategy, QAdamOptimizer
from cases import *


def keep(trainer, **values):
    torch.save(values, f"kept-{{trainer.global_rank}}.pt")

"""


def script(folder, body, *arguments, timeout=100, **environment):
    """Run ``body`` after the preamble as train.py; what it printed and its exit status. Nothing outlives it."""
    (folder / "train.py").write_text(PREAMBLE + body, encoding="utf-8")
    with launched("train.py", *arguments, folder=folder, **environment) as run:
        return SimpleNamespace(returncode=run.wait(timeout), printed=run.out + run.err)


def results(folder, body, ranks=2, timeout=100):
    """What each rank kept of a script that must succeed."""
    done = script(folder, body, timeout=timeout)
    assert done.returncode == 0, done.printed
    return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(ranks)]
