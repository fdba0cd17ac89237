"""Choose the modules whose parameters are gathered together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from geartrain import UsageError
from geartrain.plugin_api import nearest


def check_classes(module: nn.Module, classes: Collection[str], label: str) -> None:
    """Refuse a class that no part of the module has.

    Raises:
        UsageError: with the nearest class.
    """
    names = {type(part).__name__ for part in module.modules() if part is not module}
    for name in classes:
        if name not in names:
            owner = type(module).__name__
            raise UsageError(
                f"{label}: {owner} has no part of class {name}. {nearest(name, names)}"
            )


def units(module: nn.Module, classes: Collection[str], parameters: int) -> list[nn.Module]:
    """Return the parts of a module to shard one by one, inner ones first.

    What is in no unit is gathered with the whole model: so are parameters that several units share
    (tied weights), and parts without a ``forward``, as ModuleList.

    Args:
        module: the user's.
        classes: names of the units' classes; none: units are chosen by size.
        parameters: the least number of parameters in a unit, if they are chosen by size.
    """
    parts = [part for part in module.modules() if part is not module][::-1]
    uses = Counter(id(each) for part in module.modules() for each in _parameters(part))
    found: list[nn.Module] = []
    taken: set[int] = set()
    for part in parts:
        inside = [each for inner in part.modules() for each in _parameters(inner)]
        counts = Counter(map(id, inside))
        remaining = {id(each): each.numel() for each in inside if id(each) not in taken}
        is_large = not classes and sum(remaining.values()) >= parameters
        is_chosen = is_large or type(part).__name__ in classes
        has_forward = type(part).forward is not nn.Module.forward
        # MultiheadAttention reads the weights of its out_proj, and does not call it.
        has_forward &= not isinstance(part, NonDynamicallyQuantizableLinear)
        is_tied = any(uses[number] > counts[number] for number in remaining)
        if remaining and is_chosen and has_forward and not is_tied:
            found.append(part)
            taken |= remaining.keys()
    return found


def _parameters(part: nn.Module) -> list[nn.Parameter]:
    return [each for each in part._parameters.values() if each is not None]
