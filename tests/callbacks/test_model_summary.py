"""ModelSummary: a table of the layers before training."""

import re

import pytest
import torch
from small_models import EvalNet, Net, Pretend, fit, loader, trainer
from torch import nn

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import ModelSummary


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def rows(capsys):
    """Return a function that reads the cells of each printed row, by layer name."""

    def read():
        lines = [
            re.split(r"\s*[│┃]\s*", line.strip("│┃ \n"))
            for line in capsys.readouterr().out.splitlines()
            if line[:1] in "│┃"
        ]
        return {line[0]: line[1:] for line in lines}

    return read


class Shared(Net):
    def __init__(self):
        super().__init__()
        self.again = self.layers[0]
        self.lazy = nn.LazyLinear(2)
        self.table = nn.Embedding(1024, 256)
        self.table.weight.requires_grad_(False)
        self.register_buffer("kept", torch.zeros(2**20, dtype=torch.bfloat16))


def test_layers_parameters_and_sizes(rows):
    fit(Shared(), plugins=[ModelSummary()])
    assert rows() == {
        "layer": ["type", "parameters", "trainable", "MiB"],
        "layers": ["Sequential", "21", "21", "0.000"],
        "lazy": ["LazyLinear", "0", "0", "0.000"],
        "table": ["Embedding", "262,144", "0", "1.000"],
        "total": ["Shared", "262,165", "21", "3.000"],  # with the buffer's two bytes a number
    }


@pytest.mark.parametrize(("depth", "layers"), [(0, 0), (1, 1), (2, 4), (-1, 4)])
def test_depth(rows, depth, layers):
    fit(plugins=[ModelSummary(max_depth=depth)])
    assert len(rows()) == layers + 2


def test_before_training_once(capsys):
    class Says:
        @hookimpl
        def on_epoch_start(self):
            print("trains")

    fit(plugins=[Says(), ModelSummary()], max_epochs=2)
    printed = capsys.readouterr().out
    assert printed.index("total") < printed.index("trains")
    assert printed.count("total") == 1


def test_evaluation_and_other_ranks_print_nothing(capsys):
    trainer(plugins=[ModelSummary()]).validate(EvalNet(), loader())
    world = gt.World(rank=1, size=2, local_rank=1, local_size=2)
    fit(
        strategy=type("Second", (Pretend,), {"world": world})(), devices=2, plugins=[ModelSummary()]
    )
    assert capsys.readouterr().out == ""
