"""``Capabilities``: the features that a strategy declares to support."""

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
    """The features that a strategy supports. By default these are all.

    A feature that is declared unsupported and works is a failure, as in SQLAlchemy's suite, because
    an outdated declaration keeps users from the feature. Pass capabilities to the test class, or
    set the strategy's attribute ``capabilities``. The attribute is a plain mapping, so that a
    plugin need not import this package: ``capabilities = {"multi_node": False}``. If ``__init__``
    sets it, it may depend on the strategy's options.

    Raises:
        UsageError: ``convergence`` is not a number above 0 and at most 0.5.
    """

    #: Gradients stay on their rank until the last micro-batch of a window: one reduction per step.
    no_sync: bool = True
    #: A step may leave parameters unused, on all ranks or on some. If declared off, a step that
    #: uses other parameters than the one before must be an error.
    unused_parameters: bool = True
    #: Ranks may have unequal numbers of batches, with collectives in ``validation_step``, and in
    #: training on loaders without a length.
    uneven_inputs: bool = True
    #: ``training_step`` may return ``{"loss": sum, "weight": count}``: every rank steps with the
    #: mean of all ranks' gradients. If declared off, such a loss must be an error.
    weighted_loss: bool = True
    #: Each rank sees a part of the data. If declared off, every rank must see all of it.
    sharded_loader: bool = True
    #: Several machines, started by hand with NODE_RANK, MASTER_ADDR and MASTER_PORT. If declared
    #: off, ``num_nodes=2`` must be a ``UsageError`` before anything starts.
    multi_node: bool = True
    #: All ranks have the same weights, bit for bit, after training.
    identical_weights: bool = True
    #: Parameters of float64 train in float64. If declared off, weights need only have the digits of
    #: float32.
    float64: bool = True
    #: On one machine nothing listens on any address but loopback.
    loopback_only: bool = True
    #: If a rank's process dies, the run ends with the bits of one in which none has died. Off by
    #: default, and then not tested.
    recovers: bool = False
    #: The strategy's option for the number of ranks that share the given devices, if the bits do
    #: not depend on the number of devices; ``None`` if it has none.
    ranks_option: str | None = None
    #: The strategy's option for its timeout, in seconds, after which a hanging rank ends the run;
    #: ``None`` if it has none.
    timeout_option: str | None = "timeout"
    #: ``None``: N ranks must equal one process. A number c is for strategies that are approximate
    #: by design (compression, asynchronous updates): the last logged loss may exceed the last loss
    #: of one process by at most c × the first loss of one process. Weights are then not compared
    #: with one process's. c is at most ``MOST``, because an untrained model comes near a larger
    #: bound.
    convergence: float | None = None

    def __post_init__(self) -> None:
        if self.convergence is not None and not 0 < self.convergence <= MOST:
            raise UsageError(
                f"convergence={self.convergence!r} must be a number above 0 and at most {MOST}, "
                "or None for equality."
            )

    @classmethod
    def of(cls, declared: Capabilities | Mapping[str, Any] | None, whose: str) -> Capabilities:
        """Return an object of this class from a declaration.

        Args:
            declared: a plain mapping, an object of this class, or ``None``.
            whose: the plugin that declares it, for the error.

        Raises:
            UsageError: a name is unknown.
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
