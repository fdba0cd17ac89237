"""The step without torch's wrappers, and torch's compiler, which is not imported before its use."""

import functools
import inspect
import warnings

import pytest
import torch
from fresh import words_of
from small_models import Net, assert_equal, fit
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from geartrain.loop.shortcuts import step_optimizer
from geartrain.options import takes_shortcuts

#: torch's optimizers that step without a closure.
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls not in (torch.optim.Optimizer, torch.optim.LBFGS)
]
#: Those of them whose step torch wraps otherwise.
WRAPPED_OTHERWISE = {"SparseAdam", "Adafactor", "Muon"}


def parts(cls, **options):
    """Return parameters with gradients, of two dimensions, and their optimizer."""
    random = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(n, 3, generator=random)) for n in (2, 5)]
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=random)
        parameter.grad = gradient.to_sparse() if cls is torch.optim.SparseAdam else gradient
    return parameters, cls(parameters, lr=0.01, **options)


@pytest.fixture
def ranges(monkeypatch):
    """Return the list of the profiler's ranges, of which torch's wrapper opens one a step."""
    opened = []
    range_ = torch.autograd.profiler.record_function

    def note(name, *arguments):
        if name.startswith("Optimizer"):
            opened.append(name)
        return range_(name, *arguments)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", note)
    return opened


@pytest.mark.parametrize("cls", CLASSES)
def test_a_step_without_wrappers_has_the_same_bits(cls, ranges):
    stepped, optimizer = parts(cls)
    expected, by_torch = parts(cls)
    for _ in range(3):
        step_optimizer(optimizer)
    assert bool(ranges) == (cls.__name__ in WRAPPED_OTHERWISE)
    for _ in range(3):
        by_torch.step()
    assert all(torch.equal(a, b) for a, b in zip(stepped, expected, strict=True))


def test_a_fit_uses_it_also_with_a_scheduler(ranges):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler that steps first
        fit(Scheduled(), max_epochs=2)
    assert ranges == []


def test_gradients_are_on_again_after_a_step():
    _, optimizer = parts(torch.optim.SGD)
    step_optimizer(optimizer)
    assert torch.is_grad_enabled()


def hooked_before(optimizer, calls):
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))


def hooked_after(optimizer, calls):
    optimizer.register_step_post_hook(lambda *_: calls.append(1))


def replaced(optimizer, calls):
    step = optimizer.step
    optimizer.step = lambda *arguments: (calls.append(1), step(*arguments))


def replaced_and_named(optimizer, calls):
    step = optimizer.step
    optimizer.step = functools.wraps(step)(lambda *arguments: (calls.append(1), step(*arguments)))


def replaced_under_a_scheduler(optimizer, calls):
    step = type(optimizer).step

    def note(self, *arguments):
        calls.append(1)
        return step(self, *arguments)

    optimizer.step = note.__get__(optimizer)
    lr_scheduler.StepLR(optimizer, 1)


def replaced_over_a_scheduler(optimizer, calls):
    lr_scheduler.StepLR(optimizer, 1)
    replaced_and_named(optimizer, calls)


@pytest.mark.parametrize(
    "change",
    [
        hooked_before,
        hooked_after,
        replaced,
        replaced_and_named,
        replaced_under_a_scheduler,
        replaced_over_a_scheduler,
    ],
)
def test_what_a_user_adds_to_an_optimizer_is_called(change):
    _, optimizer = parts(torch.optim.SGD)
    calls = []
    change(optimizer, calls)
    step_optimizer(optimizer)
    assert calls == [1]


def test_a_hook_of_all_optimizers_is_called():
    _, optimizer = parts(torch.optim.SGD)
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        step_optimizer(optimizer)
    finally:
        handle.remove()
    assert calls == [1]


@pytest.mark.parametrize("named", [True, False])
def test_a_replaced_step_of_a_class_is_called_also_after_the_first_step(monkeypatch, named):
    _, optimizer = parts(torch.optim.SGD)
    step_optimizer(optimizer)
    step, calls = torch.optim.SGD.step, []

    def note(self, *arguments):
        calls.append(1)
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(step)(note) if named else note)
    step_optimizer(optimizer)
    assert calls == [1]


def test_a_subclass_with_a_step_of_its_own_is_called():
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            return super().step(closure)

    _, optimizer = parts(Counting)
    step_optimizer(optimizer)
    assert optimizer.calls == 1


def test_a_profiler_sees_the_step():
    _, optimizer = parts(torch.optim.SGD)
    with torch.autograd.profiler.profile() as profile:
        step_optimizer(optimizer)
    assert any("Optimizer.step#SGD" in event.name for event in profile.function_events)


def test_a_differentiable_step_keeps_its_graph():
    parameter = nn.Parameter(torch.ones(2))
    moved = parameter.clone()
    optimizer = torch.optim.SGD([moved], 0.1, differentiable=True)
    moved.grad = moved.detach().clone()
    step_optimizer(optimizer)
    assert moved.requires_grad
    assert moved.grad_fn is not None


def test_GEARTRAIN_PLAIN_turns_it_off(monkeypatch, ranges):
    monkeypatch.setenv("GEARTRAIN_PLAIN", "1")
    takes_shortcuts.cache_clear()
    expected, stepped = Net(), Net()
    stepped.load_state_dict(expected.state_dict())
    fit(stepped)
    assert len(ranges) == 6
    monkeypatch.delenv("GEARTRAIN_PLAIN")
    takes_shortcuts.cache_clear()
    fit(expected)
    assert_equal(expected, stepped)


#: Fits, prints whether the compiler is imported; then compiles what resets gradients.
PROGRAM = """
import sys, torch
from regression import Net, one_trainer, samples

one_trainer().fit(Net(optimizer="adam"), torch.utils.data.DataLoader(samples(), 24))
print("torch._dynamo" in sys.modules)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

def function(x):
    optimizer.zero_grad()
    return x + 1

compiled = torch.compile(function, backend="eager")
assert torch.equal(compiled(torch.ones(1)), torch.full((1,), 2.0))
marked = torch.optim.Optimizer.zero_grad.__wrapped__
print(marked.__dict__["__dynamo_disable"] is not marked)
"""


@pytest.mark.parametrize("plain", ["0", "1"])
def test_the_compiler_is_imported_when_something_compiles(plain, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PLAIN", plain)
    assert words_of(PROGRAM) == [str(plain == "1"), "True"]
