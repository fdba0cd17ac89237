"""Every class of torch and every entry point of ours can be drawn, and works where torch does."""

from itertools import pairwise

import pytest
import torch
from torch.utils import data

from . import draws, pools, program
from .borders import BORDERS

DRAWS = [draws.draw(0, number) for number in range(3000)]


def names_of_plugins():
    return {name.partition(".")[0] for name in pools.plugins()}


@pytest.mark.parametrize("name", pools.optimizers())
def test_an_optimizer_steps(name):
    model = torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True), torch.nn.Linear(2, 1))
    sparse = list(model[0].parameters()) if name == "SparseAdam" else []
    parameters = sparse + list(model[1].parameters())
    made = pools.optimizers_of(name, parameters, sparse)
    assert name in {type(optimizer).__name__ for optimizer in made}
    assert sum(len(group["params"]) for o in made for group in o.param_groups) == len(parameters)

    def gradients():
        loss = model(torch.tensor([0, 1])).square().mean()
        loss.backward()
        return loss

    gradients()
    for optimizer in made:
        optimizer.step(gradients if name == "LBFGS" else None)


@pytest.mark.parametrize(
    "name", [*pools.schedulers(), *(f"{n}(StepLR,StepLR)" for n in pools.NESTS)]
)
def test_a_scheduler_steps_and_changes_the_rate(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    made = pools.scheduler_of(name, optimizer)
    rates = set()
    for _ in range(12):
        optimizer.step()
        made.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.add(optimizer.param_groups[0]["lr"])
    assert len(rates) > 1
    assert pools.torch_can(name)


@pytest.mark.parametrize("kind", pools.loaders())
def test_a_loader_gives_samples(kind):
    loader = program.loader_of(kind, 4, 0, 1)
    if kind == "several":  # which the trainer combines
        loader = loader[0]
    if kind == "combined:sequential":  # which is refused for training
        loader = loader.iterables["a"]
    batch = next(iter(loader))
    x, y = program.pairs(batch)
    assert x.shape[1] == 3
    assert y.shape == (len(x), 1)


@pytest.mark.parametrize("name", pools.plugins())
def test_a_plugin_is_built(name, tmp_path):
    pools.plugin_of(name, "val_loss", str(tmp_path))


def test_each_plugin_is_drawn_or_asked_for_or_left_out_with_a_reason():
    asked = {entry.value.partition(":")[0] for entry in pools.entries("implied").values()}
    drawn = names_of_plugins() - pools.callbacks().keys()  # which no entry point has
    assert pools.entries("plugins").keys() == drawn | asked | pools.LEFT_OUT.keys()
    assert pools.LEFT_OUT.keys() <= pools.entries("plugins").keys()


def test_each_option_and_method_that_adds_a_plugin_can_be_asked_for():
    methods = {f"fit.Module.{n}" for n in program.CLASSES} | {
        f"Module.{n}" for n in program.CLASSES
    }
    assert set(pools.implied()) <= pools.IMPLIED.keys() | methods


def test_each_sampler_and_dataset_of_torch_is_in_a_loader():
    families = {kind.partition(":")[2] for kind in pools.loaders()}
    samplers = {
        name
        for name in data.__all__
        if isinstance(getattr(data, name), type) and issubclass(getattr(data, name), data.Sampler)
    }
    assert samplers - families == {"Sampler", "BatchSampler"}  # the base, and "batch_sampler"


@pytest.mark.parametrize(
    ("factor", "pool"),
    [
        ("optimizer", pools.optimizers),
        ("loader", pools.loaders),
        ("strategy", pools.strategies),
        ("precision", pools.precisions),
        ("border", lambda: list(BORDERS)),
        ("hook", pools.module_hooks),
    ],
)
def test_draws_reach_every_value(factor, pool):
    assert set(pool()) <= {getattr(draw, factor) for draw in DRAWS}


def test_draws_reach_every_plugin_also_twice_and_in_both_orders():
    drawn = {name for draw in DRAWS for name in draw.plugins}
    assert set(pools.plugins()) <= drawn
    assert set(pools.implied()) <= {name for draw in DRAWS for name in draw.implied}
    kinds = [[name.partition(".")[0] for name in draw.plugins] for draw in DRAWS]
    orders = {pair for names in kinds for pair in pairwise(names)}
    assert {("ema", "model_checkpoint"), ("model_checkpoint", "ema")} <= orders
    assert {(name, name) for name in names_of_plugins()} <= orders


def test_draws_reach_every_scheduler_alone_and_in_each_nest():
    texts = {draw.scheduler for draw in DRAWS}
    assert set(pools.schedulers()) <= texts
    for nest in pools.NESTS:
        inside = {
            part
            for text in texts
            if text.startswith(nest)
            for part in pools.split(text.removeprefix(nest)[1:-1])
        }
        possible = {n for n in pools.nested() if pools.torch_can(f"{nest}({n},StepLR)")}
        assert possible <= inside


def test_a_draw_prints_itself():
    for draw in DRAWS[:300]:
        assert program.Draw.read(str(draw)) == draw


def test_a_draw_is_the_same_for_the_same_seed():
    assert draws.draw(5, 7) == draws.draw(5, 7) != draws.draw(5, 8)
