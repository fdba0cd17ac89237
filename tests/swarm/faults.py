"""Faults that are known and not yet mended: the list shrinks.

test_swarm.py fails if the example of an entry no longer fails: then remove the entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .pools import SHARDED
from .program import Draw

#: Schedulers that cannot follow a group of parameters that an optimizer gets later.
FIXED = (
    "LambdaLR",
    "MultiplicativeLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
    "SWALR",
)


@dataclass(frozen=True)
class Fault:
    """A fault: its cause, a draw that shows it, and the draws that may meet it."""

    cause: str
    example: str
    covers: Callable[[Draw], bool]


FAULTS = [
    Fault(
        "a checkpoint lacks the average if the module saves its weights under other names",
        "evaluate single plugins=ema hook=on_save_checkpoint",
        lambda draw: (
            draw.hook == "on_save_checkpoint" and any(n[:3] in ("ema", "swa") for n in draw.plugins)
        ),
    ),
    Fault(
        "a checkpoint that is saved within a window has the random state of that moment, and "
        "resumes at the window's first batch",
        "killed single loader=shuffled accumulate=3 saved=now",
        lambda draw: (
            draw.saved == "now" and draw.border in ("killed", "error") and draw.accumulate > 1
        ),
    ),
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
        "backbone_finetuning adds a group, at which some of torch's schedulers raise a raw error",
        "sanity single scheduler=LambdaLR plugins=backbone_finetuning",
        lambda draw: (
            "backbone_finetuning" in draw.plugins
            and (
                any(name in draw.scheduler for name in FIXED)
                or "swa" in draw.plugins
                or draw.optimizer in ("Muon", "SparseAdam")  # which take no other parameters
            )
        ),
    ),
    Fault(
        "two plugins of the class Remote share one folder and fail in the run",
        "sanity single plugins=remote+remote",
        lambda draw: draw.plugins.count("remote") > 1,
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
