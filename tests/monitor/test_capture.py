"""``capture_check``: each line of a step that a graph could not contain, on the CPU."""

import random

import numpy
import pytest
import torch
from small_models import Net, fit

from geartrain_monitor.capture import CaptureCheck, watched


def item(x):
    return x.sum().item()


def condition(x):
    return 1 if x.sum() > 0 else 0


def number(x):
    return float(x.sum())


def listed(x):
    return x.tolist()


def equal(x):
    return torch.equal(x, x)


def to_host(x):
    return x.to("cpu")


def as_array(x):
    return x.numpy()


def positions(x):
    return x.nonzero()


def chosen(x):
    return x[x > 0]


def unique(x):
    return torch.unique(x)


def made(x):
    return x + torch.tensor([1.0])


def drawn(x):
    return x * random.random()


def shuffled(x):
    return x * random.randint(1, 3)


def drawn_by_numpy(x):
    return x * numpy.random.rand()


def clean(x):
    mask = torch.where(x > 0, x, torch.zeros_like(x)) + torch.rand(3) + x.mean().detach()
    return mask.to(torch.float64).clone()


READS = (item, condition, number, listed, equal)
COPIES = (to_host, as_array)
SHAPES = (positions, chosen, unique)
DRAWS = (drawn, shuffled)
KINDS = {
    **dict.fromkeys(READS, "reads a number"),
    **dict.fromkeys(COPIES, "copies to the host"),
    **dict.fromkeys(SHAPES, "shape that depends on data"),
    **dict.fromkeys(DRAWS, "draws from a generator"),
    made: "makes a tensor of Python values",
}


@pytest.mark.parametrize("function", KINDS)
def test_a_line_and_its_reason(function):
    with watched() as found:
        function(torch.ones(3))
    line = function.__code__.co_firstlineno + 1
    assert {(reason.file, reason.line) for reason in found} == {(__file__, line)}
    assert any(KINDS[function] in reason.text for reason in found)


def test_a_draw_of_numpy_has_no_line():
    with watched() as found:
        drawn_by_numpy(torch.ones(3))
    assert [str(reason).splitlines()[0] for reason in found] == ["a call of numpy.random"]


def test_what_a_graph_can_contain():
    with watched() as found:
        clean(torch.ones(3))
    assert not found


class Reads(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)  # which reads nothing on a GPU
        self.value = loss.item()
        return loss


def test_a_fit_prints_the_lines_of_its_second_step(capsys):
    check = CaptureCheck()
    fit(Reads(), plugins=[check])
    printed = capsys.readouterr().out
    assert "could not contain these lines" in printed
    assert "test_capture.py" in printed
    assert "self.value = loss.item()\n    reads a number" in printed
    assert len(check.reasons) == 1
    fit(Net(), plugins=[CaptureCheck()])
    assert "a graph could contain this step" in capsys.readouterr().out
