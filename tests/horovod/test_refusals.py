"""Errors during set-up, on each rank, have the reason and the fix."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import geartrain as gt

pytest.importorskip("geartrain_horovod", reason="geartrain-horovod is not installed")

from geartrain_horovod import checks, launching
from geartrain_horovod.elastic import Elastic
from geartrain_horovod.gradients import Reduction
from geartrain_horovod.wrapped import Wrapped

pytestmark = pytest.mark.horovod


class NeedsMore(torch.optim.SGD):
    """An optimizer that needs more than parameter groups, which are all that Horovod passes."""

    def __init__(self, params, lr, more):
        super().__init__(params, lr)


MODULES = {
    "layer.weight is torch.bfloat16": lambda: nn.Linear(2, 2).to(torch.bfloat16),
    "layer.weight is torch.complex64": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "layer.weight is not contiguous": lambda: nn.Conv2d(3, 4, 2).to(
        memory_format=torch.channels_last
    ),
}


def add(layer, make):
    """Let Horovod's optimizer reduce a module's gradients."""
    module = nn.ModuleDict({"layer": layer})
    collectives = SimpleNamespace(hvd=launching.horovod(), name=lambda what: what)
    run = SimpleNamespace(module=module, mode="automatic")
    Wrapped(collectives, Reduction(), 1).add(run, make(module.parameters()))


@pytest.mark.parametrize("why", MODULES)
def test_parameters_that_horovods_optimizer_does_not_support(why):
    with pytest.raises(
        gt.UsageError,
        match=rf"distributed_optimizer=True: {why}, which Horovod refuses\. "
        "Fix: distributed_optimizer=False",
    ):
        add(MODULES[why](), lambda parameters: torch.optim.SGD(parameters, 0.1))


def test_an_optimizer_that_horovod_cannot_create_again():
    with pytest.raises(
        gt.UsageError,
        match=r"Horovod creates a second NeedsMore .*'more'.*Fix: distributed_optimizer=False",
    ):
        add(nn.Linear(2, 2), lambda parameters: NeedsMore(parameters, 0.1, more=1))


def test_an_accelerator_that_horovod_does_not_support():
    plan = SimpleNamespace(
        accelerator=SimpleNamespace(name="mps"),
        processes=2,
        strategy=SimpleNamespace(label="LABEL"),
    )
    with pytest.raises(
        gt.UsageError, match=r"LABEL: Horovod does not support mps\. Fix: --accelerator cpu or cuda"
    ):
        checks.check_combination(plan, gt.Module(), "average", None, 1)


def test_a_process_set_that_horovod_was_initialised_without(monkeypatch):
    """Under horovodrun, Horovod stays initialised as the program's first run did it."""
    hvd = launching.horovod()
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(launching, "_process_sets", {})
    meeting = object.__new__(launching.Meeting)
    meeting.hvd, meeting._stays = hvd, True
    with pytest.raises(
        gt.TrainingError,
        match=r"process_set=\[0, 2\]: Horovod was initialised before.*"
        "Fix: pass the same process_set in every run",
    ):
        meeting._kept([0, 2])


def test_a_new_worker_in_a_programs_second_call_is_an_error():
    """The worker is in its first call, whose operations have other names."""
    table = torch.tensor([[2, 5], [1, -1]])
    collectives = SimpleNamespace(start=lambda *_, **__: 0, wait=lambda *_: table)
    words = "a new worker started with call 1 of a trainer's fit, validate, test or predict, while"
    with pytest.raises(gt.TrainingError, match=re.escape(words)):
        Elastic(every=None).agree(SimpleNamespace(), collectives)
