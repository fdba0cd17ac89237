"""Faults that are known and not yet mended: the list shrinks.

test_swarm.py fails if the example of an entry no longer fails: then remove the entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .pools import SHARDED
from .program import Draw


@dataclass(frozen=True)
class Fault:
    """A fault: its cause, a draw that shows it, and the draws that may meet it."""

    cause: str
    example: str
    covers: Callable[[Draw], bool]


FAULTS = [
    Fault(
        "elastic refuses sparse gradients in the first step, not before",
        "ranks elastic optimizer=SparseAdam",
        lambda draw: draw.optimizer == "SparseAdam" and "elastic" in (draw.strategy, draw.other),
    ),
    Fault(
        "compile under tensor_parallel ends with an error of Dynamo's",
        "sanity tensor_parallel plugins=compile loader=sampler:SubsetRandomSampler",
        lambda draw: "compile" in draw.plugins and "tensor_parallel" in (draw.strategy, draw.other),
    ),
    Fault(
        "an optimizer that fsdp cannot step is refused at its first step, not before",
        "sanity fsdp optimizer=Adafactor",
        lambda draw: bool(
            draw.optimizer in ("Adafactor", "LBFGS", "Muon")
            and {draw.strategy, draw.other} & {*SHARDED}
        ),
    ),
    Fault(
        "under ddp_sharded a weight that a hook sets between forward and backward is lost",
        "ranks ddp_sharded hook=on_before_backward",
        lambda draw: (
            draw.hook == "on_before_backward" and bool({draw.strategy, draw.other} & {*SHARDED})
        ),
    ),
]


def reason(draw: Draw) -> str:
    """Return the cause of a known fault that a draw may meet, or ``""``."""
    return next((fault.cause for fault in FAULTS if fault.covers(draw)), "")
