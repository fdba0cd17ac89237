"""``capture_check``: each line of a step that a graph could not contain, on the CPU."""

import random
import subprocess
import sys

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


def made_by_name(x):
    return x + torch.tensor(data=[1.0])


def clean(x):
    x = x.to(x.device) + torch.as_tensor(data=x)
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
    **dict.fromkeys((made, made_by_name), "makes a tensor of Python values"),
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


def test_a_fit_of_one_step_says_that_none_was_watched(capsys):
    fit(plugins=[CaptureCheck()], max_steps=1)
    assert "fewer than two steps" in capsys.readouterr().out


def test_what_is_compiled_is_watched_as_it_is_and_compiled_afterwards():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(item, backend=backend)
    with watched() as found:
        compiled(torch.ones(3))
    assert [reason.text.partition(":")[0] for reason in found] == ["reads a number of the device"]
    assert graphs == []
    compiled(torch.ones(3))
    assert graphs


PROGRAM = """
import torch
from geartrain_monitor.capture import watched
with watched() as found:
    torch.ones(3).sum().item()
print([reason.text.partition(" ")[0] for reason in found])
"""


def test_the_import_of_the_compiler_is_no_reason():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "['reads']"
