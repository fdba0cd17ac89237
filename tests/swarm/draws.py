"""Random draws: the same for the same seed and number."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from . import pools
from .borders import BORDERS, STARTS_PROCESSES
from .program import Draw

#: Strategies with which two ranks have the weights of one process; bagua's default algorithm does.
EQUAL_TO_ONE = tuple(name for name in pools.strategies() if name not in ("single", "ddp2"))
#: Events that do not occur between the start and the end of a training batch.
HARMLESS = ("on_train_epoch_end", "on_save_checkpoint")
#: Loaders that hold samples, or a copy of the dataset, of the time when they were made.
KEEPS_SAMPLES = ("list", "stateful", "persistent")
#: One draw in so many has processes that import torch themselves.
REAL_START = 8
#: Plugins that change the training in ways that the loop by hand does not copy.
TRAINS_OTHERWISE = (
    *("accumulation_scheduler", "backbone_finetuning", "early_stopping"),
    *pools.AVERAGES,
)


def weighted(choose: random.Random, common: Any, others: Sequence[Any], chance: float) -> Any:
    """Return one of the others with the probability ``chance``, otherwise the common value."""
    return choose.choice(others) if choose.random() < chance else common


def draw(seed: int, number: int, border: str = "", processes: bool = True) -> Draw:
    """Return a draw.

    Args:
        border: of the draw; default: any.
        processes: False without strategies that start processes, which import torch again.
    """
    choose = random.Random(f"{seed} {number}")
    names = [border] if border else [n for n in BORDERS if processes or n != "death"]
    chosen = choose.choice(names)
    known = pools.strategies()
    strategies = [
        name for name in known if processes or name not in (*STARTS_PROCESSES, "deepspeed")
    ]
    strategy = weighted(choose, "single", strategies, 0.35)
    made = Draw(
        border=chosen,
        strategy=strategy,
        precision=weighted(choose, "32-true", pools.precisions(), 0.4),
        optimizer=choose.choice(pools.optimizers()),
        scheduler=weighted(choose, "", [scheduler(choose)], 0.8),
        interval=choose.choice(["epoch", "step"]),
        plugins=plugins(choose),
        implied=tuple(weighted(choose, (), [(name,) for name in pools.implied()], 0.25)),
        loader=choose.choice(pools.loaders()),
        optimisation=weighted(choose, "automatic", ["several", "manual"], 0.4),
        accumulate=choose.choice([1, 1, 2, 3]),
        validation=choose.choice(["epoch", "epoch", "none", "inside", "half", "rare"]),
        hook=weighted(choose, "", pools.module_hooks(), 0.3),
        noise=choose.random() < 0.3,
        clip=choose.random() < 0.2,
        sanity=choose.choice([0, 2]),
        moment=choose.choice(["epoch", "epoch", "validation"]),
        saved=choose.choice(["auto", "auto", "now"]),
        reordered=choose.random() < 0.3,
        datamodule=choose.random() < 0.2,
        fork=number % REAL_START != 0,
    )
    if made.loader in KEEPS_SAMPLES or "overfit_batches" in made.implied:
        made = replace(made, datamodule=False)
    if "SparseAdam" in made.optimizer:  # torch clips no sparse gradient
        made = replace(made, clip=False)
    if len(set(made.plugins)) < len(made.plugins):  # equal ones are told apart by their order
        made = replace(made, reordered=False)
    if sum("accumulation_scheduler" in name for name in made.plugins) > 1:  # the last one counts
        made = replace(made, reordered=False)
    if any("accumulation_scheduler" in name for name in made.plugins):
        made = replace(made, accumulate=1, optimisation="automatic", saved="auto")
    if made.optimisation == "manual":  # which steps and clips by itself
        made = replace(made, accumulate=1, clip=False)
    if made.saved == "now":  # an event before its own checkpoint comes again after a resume, and
        # within a step save_checkpoint warns that its batches do
        made = replace(made, accumulate=1, hook=made.hook and choose.choice(HARMLESS))
    if sum(name.partition(".")[0] in pools.AVERAGES for name in made.plugins) > 1:  # the last stays
        made = replace(made, reordered=False)
    if made.validation == "none" and made.moment == "validation":
        made = replace(made, moment="epoch")
    return LIMITS.get(chosen, lambda choose, made, strategies: made)(choose, made, strategies)


def plugins(choose: random.Random) -> tuple[str, ...]:
    """Return up to three plugins; often two of one class, in any order."""
    known = pools.plugins()
    chosen = [choose.choice(known) for _ in range(choose.choice([0, 1, 2, 3]))]
    if len(chosen) > 1 and choose.random() < 0.3:
        name = chosen[0].partition(".")[0]
        chosen[1] = choose.choice([each for each in known if each.partition(".")[0] == name])
    return tuple(chosen)


def scheduler(choose: random.Random, depth: int = 0) -> str:
    """Return a scheduler; a third are nested, at most two deep."""
    while not pools.torch_can(text := _scheduler(choose, depth)):
        pass
    return text


def _scheduler(choose: random.Random, depth: int) -> str:
    if depth > 1 or choose.random() < 0.6:
        return str(choose.choice(pools.nested() if depth else pools.schedulers()))
    parts = [scheduler(choose, depth + 1) for _ in range(2)]
    return f"{choose.choice(pools.NESTS)}({','.join(parts)})"


def same_on_ranks(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    """Remove values with which two ranks rightly train otherwise than one.

    Examples are noise, of which each rank draws its own, and loaders in random order.
    """
    ordered = ("plain", "dataset:TensorDataset", "dataset:StackDataset", "dataset:ConcatDataset")
    loader = choose.choice([*ordered, "sampler:SequentialSampler", "iterable"])
    hook = made.hook if "valid" not in made.hook else ""
    precision = choose.choice(["32-true", "64-true"])
    steady = {"LBFGS", "Rprop", "Adafactor"}  # signs and line searches amplify rounding
    optimizer = "SGD" if made.optimizer in steady else made.optimizer
    return replace(
        made,
        loader=loader,
        hook=hook,
        noise=False,
        precision=precision,
        optimizer=optimizer,
        implied=tuple(name for name in made.implied if name != "overfit_batches"),  # of each rank
    )


def on_strategies(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    several = [name for name in strategies if name in EQUAL_TO_ONE]
    made = replace(same_on_ranks(choose, made, strategies), strategy=choose.choice(several))
    return replace(
        made, other=choose.choice([n for n in [*several, "single"] if n != made.strategy])
    )


def on_sizes(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    several = [name for name in strategies if name in EQUAL_TO_ONE]
    made = replace(same_on_ranks(choose, made, strategies), strategy=choose.choice(several))
    return replace(made, other=choose.choice(["1", "4"]), loader="plain")


def on_elastic(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    return replace(made, strategy="elastic", death=choose.choice(["killed", "error", "hang"]))


def in_a_loop(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    plugins = [name for name in made.plugins if name.partition(".")[0] not in TRAINS_OTHERWISE]
    return replace(
        made,
        strategy="single",
        precision=choose.choice(["32-true", "64-true"]),
        plugins=tuple(plugins),
        hook="",
        noise=False,
        # After each epoch or never: the metric that a plateau scheduler reads between validations
        # is tested in tests/core/loop.
        validation=choose.choice(["epoch", "none"]),
        interval="epoch" if "Plateau" in made.scheduler else made.interval,
    )


def without_validation_hook(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    """Remove a hook of validation that changes state: a sanity check would call it, too."""
    return replace(made, hook="" if "validation" in made.hook else made.hook)


def without_swa(choose: random.Random, made: Draw, strategies: list[str]) -> Draw:
    """Remove ``swa``: its average becomes the weights only after ``last.ckpt`` was saved."""
    return replace(made, plugins=tuple(name for name in made.plugins if name != "swa"))


#: By border, a function that removes values with which its two sides need not be equal.
LIMITS: dict[str, Callable[[random.Random, Draw, list[str]], Draw]] = {
    "ranks": on_strategies,
    "other_strategy": on_strategies,
    "other_size": on_sizes,
    "death": on_elastic,
    "by_hand": in_a_loop,
    "sanity": without_validation_hook,
    "evaluate": without_swa,
}


def simpler(made: Draw) -> list[Draw]:
    """Return draws that are each simpler by one value, for the search of the simplest failure."""
    default = Draw()
    found = [
        replace(made, **{field.name: getattr(default, field.name)})
        for field in fields(Draw)[3:]
        if getattr(made, field.name) != getattr(default, field.name)
    ]
    found += [
        replace(made, plugins=made.plugins[:n] + made.plugins[n + 1 :])
        for n in range(len(made.plugins))
        if len(made.plugins) > 1
    ]
    if "(" in made.scheduler:
        inside = pools.split(made.scheduler.partition("(")[2].removesuffix(")"))
        found += [replace(made, scheduler=part) for part in inside]
    return found
