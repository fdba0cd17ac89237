"""Norms of gradients and parameters."""

import copy
import math

import pytest
import torch
from small_models import Loggers, Net, fit, loader

from geartrain import UsageError, hookimpl
from geartrain.callbacks import Norms, grad_norm


def lines(*plugins, module=None, **options):
    """Return ``(step, metrics)`` of each flush."""
    loggers = Loggers()
    fit(module, plugins=[loggers, *plugins], **{"log_every_n_steps": 1, **options})
    return loggers.lines


class Seen:
    """Compute the norms just before each step."""

    def __init__(self):
        self.gradients, self.parameters, self.each = [], [], []

    @hookimpl(wrapper=True)
    def optimizer_step(self, run, optimizer):
        each = {name: p.grad.norm().item() for name, p in run.module.named_parameters()}
        self.each.append(each)
        self.gradients.append(math.hypot(*each.values()))
        self.parameters.append(math.hypot(*(p.norm().item() for p in run.module.parameters())))
        return (yield)


@pytest.mark.parametrize("parameters", [False, True])
def test_the_norm_of_each_step_is_of_the_moment_before_it(parameters):
    seen = Seen()
    found = lines(seen, Norms(gradients=not parameters, parameters=parameters))
    name, norms = ("param_norm", seen.parameters) if parameters else ("grad_norm", seen.gradients)
    assert found == [(i + 1, {name: pytest.approx(norm)}) for i, norm in enumerate(norms)]


def test_each_parameter():
    seen = Seen()
    metrics = lines(seen, Norms(parameters=True, per_parameter=True))[2][1]
    found = {name: metrics[f"grad_norm/{name}"] for name in seen.each[2]}
    assert found == pytest.approx(seen.each[2])
    assert {name.partition("/")[2] for name in metrics if "/" in name} == set(seen.each[2])
    assert sum(name.startswith("param_norm/") for name in metrics) == 4


@pytest.mark.parametrize("how", ["norm", "value"])
def test_before_clipping(how):
    clipped, module = Seen(), Net()
    expected = lines(Norms(), module=copy.deepcopy(module), max_steps=1)[0][1]["grad_norm"]
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": how}
    found = lines(clipped, Norms(), module=module, max_steps=1, **clip)
    assert found[0][1]["grad_norm"] == pytest.approx(expected)
    assert clipped.gradients[0] < expected / 10


@pytest.mark.parametrize(
    ("every", "flush", "steps"), [(None, 2, [2, 4, 6]), (3, 1, [3, 6]), (1, 3, [3, 6]), (4, 2, [4])]
)
def test_how_often(every, flush, steps):
    assert [step for step, _ in lines(Norms(every=every), log_every_n_steps=flush)] == steps


def test_unscaled_in_16_mixed():
    """The scaler's first steps overflow and are skipped: infinite norm, unchanged weights."""
    same = [next(iter(loader()))] * 12
    module = Net()
    found = lines(Norms(), module=copy.deepcopy(module), precision="16-mixed", train=same)
    half = [metrics["grad_norm"] for _, metrics in found if "grad_norm" in metrics]
    full = lines(Norms(), module=module, train=same)[0][1]["grad_norm"]
    assert next(norm for norm in half if math.isfinite(norm)) == pytest.approx(full, rel=0.02)


def test_untrained_parameters_are_left_out():
    module = Net()
    module.layers[0].requires_grad_(False)
    metrics = lines(Norms(parameters=True, per_parameter=True), module=module)[0][1]
    assert not any("layers.0" in name for name in metrics)


@pytest.mark.parametrize("order", [1, 2.0, 3, "inf"])
def test_grad_norm_has_lightnings_names_and_torchs_values(order):
    class Logs(Net):
        def on_before_optimizer_step(self, optimizer):
            norms = grad_norm(self, norm_type=order)
            self.log_dict(norms)
            self.kept = {name: p.grad.clone() for name, p in self.named_parameters()}

    module = Logs()
    metrics = lines(module=module, max_steps=1)[0][1]
    name, order = f"grad_{float(order)}_norm", float(order)
    expected = {f"{name}/{key}": g.norm(order).item() for key, g in module.kept.items()}
    everything = torch.cat([g.flatten() for g in module.kept.values()])
    expected[f"{name}_total"] = everything.norm(order).item()
    assert metrics == pytest.approx(expected)


def test_grad_norm_leaves_out_parameters_without_a_gradient():
    module = Net()
    assert grad_norm(module, 2) == {}
    module.layers[2](torch.ones(1, 4)).sum().backward()
    assert list(grad_norm(module, 2, ".")) == [
        "grad_2.0_norm.layers.2.weight",
        "grad_2.0_norm.layers.2.bias",
        "grad_2.0_norm_total",
    ]


@pytest.mark.parametrize("order", [0, -1, "two", None])
def test_grad_norm_refuses_an_order_that_is_no_number_above_0(order):
    with pytest.raises(UsageError, match=r"norm_type=.* must be above 0. Fix: 2"):
        grad_norm(Net(), order)
