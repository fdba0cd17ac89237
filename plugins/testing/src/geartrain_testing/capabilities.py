"""What a strategy says it can and cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import nearest

#: The largest ``convergence`` that may be declared.
MOST = 0.5


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a strategy supports. Everything is supported unless it is declared otherwise.

    A feature that is declared unsupported and works all the same is a failure, as in SQLAlchemy's suite: a declaration that is
    out of date keeps users from a feature. Give them to the test class, or to the strategy as an attribute ``capabilities``,
    a plain mapping, so that a plugin need not import this package: ``capabilities = {"multi_node": False}``. An attribute that is
    set in ``__init__`` may depend on the strategy's options.

    Raises:
        UsageError: ``convergence`` is no number above 0 and at most 0.5.
    """

    #: Gradients stay on their rank until the last micro-batch of a window: one reduction a step.
    no_sync: bool = True
    #: Parameters that a step does not use, on all ranks or on some. Where it is declared off, a step that uses other parameters
    #: than the one before must end in an error.
    unused_parameters: bool = True
    #: Ranks with unequal numbers of batches: collectives in ``validation_step``, and training on loaders without a length.
    uneven_inputs: bool = True
    #: Each rank sees its own part of the data. Where it is declared off, every rank must see all of it.
    sharded_loader: bool = True
    #: Several machines, started by hand with NODE_RANK, MASTER_ADDR and MASTER_PORT. Where it is declared off, ``num_nodes=2``
    #: must be refused with a ``UsageError`` before anything starts.
    multi_node: bool = True
    #: All ranks have the same weights, bit by bit, after training.
    identical_weights: bool = True
    #: On one machine nothing listens on any address but loopback.
    loopback_only: bool = True
    #: The strategy's option with the seconds after which a rank that hangs ends the run; ``None`` where it has none.
    timeout_option: str | None = "timeout"
    #: ``None``: N ranks must equal one process. A number c, for strategies that are approximate by design (compression,
    #: asynchronous updates): instead, the last logged loss may exceed the last one of one process by at most c × the first one of
    #: one process; weights are not compared with one process's. At most ``MOST``: what trains on nothing comes near a larger one.
    convergence: float | None = None

    def __post_init__(self) -> None:
        if self.convergence is not None and not 0 < self.convergence <= MOST:
            raise UsageError(
                f"convergence={self.convergence!r} must be a number above 0 and at most {MOST}, or None for equality."
            )

    @classmethod
    def of(cls, declared: Capabilities | Mapping[str, Any] | None, whose: str) -> Capabilities:
        """Capabilities from what was declared.

        Args:
            declared: a plain mapping, an object of this class, or nothing.
            whose: who declared it, for the error.

        Raises:
            UsageError: an unknown name.
        """
        if isinstance(declared, Capabilities):
            return declared
        known = [field.name for field in fields(cls)]
        for name in declared or {}:
            if name not in known:
                raise UsageError(
                    f"{whose}: there is no capability {name!r}. {nearest(str(name), known)}"
                )
        return cls(**(declared or {}))


#: Names of the capabilities that are on or off.
SWITCHES = tuple(field.name for field in fields(Capabilities) if field.type == "bool")
