"""Common parts of strategies with several processes; users import ``geartrain.parallel``.

- ``ProcessGroupStrategy``: the base class of a strategy whose ranks use torch.distributed.
- ``SeveralRanks``: the common work of ranks, for the hook ``make_coordinator`` of a strategy
  without torch.distributed.
- ``launch``: become a rank and start the others, or join a launcher's ranks; ``detect``: return the
  launcher and the rank of this process.
- ``reserve``, ``variables``, ``threads``, ``join``, ``die_with_parent``, ``write_output_to``,
  ``raise_on_signals``, ``reason_not_rerunnable``, ``report``: for a strategy that starts its ranks
  in another way, such as ``geartrain-spawn``. ``launch`` starts and connects ranks with
  ``bootstrap``, ``nodes``, ``rendezvous`` and ``sockets``.
- ``Supervisor``, ``RankHandle``, ``Failure``, ``Patience``: watch the ranks that a strategy has
  started, decide which failed first, and end the others; ``is_connection``: true for an error that
  only says that another rank has gone; ``describe_exit``: say how a process has ended.
- ``announce_reduction``: tell ranks that wait elsewhere that this rank reduces gradients;
  ``CollectiveOrder``: let ranks agree on a collective of a library before they enter it.
- ``shard``, ``gather_uneven``, ``average_gradients``, ``broadcast_weights``, ``broadcast_object``,
  ``name_absent_ranks``: data and collectives on torch.distributed; ``refuse_unequal``: refuse
  tensors that ``all_gather`` cannot combine; ``refuse_sparse``: refuse tables whose gradients are
  sparse; ``steps_in_parts``: find out if an optimizer can step parts of parameters;
  ``absent_weights``: make the weights of a rank that has none.

A name is imported on first use, because watching ranks needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geartrain_parallel._version import __version__ as __version__

if TYPE_CHECKING:
    from geartrain.plugin_api import ClusterEnvironment, detect
    from geartrain_parallel import bootstrap, nodes, rendezvous, sockets
    from geartrain_parallel.absent import absent_weights
    from geartrain_parallel.bootstrap import die_with_parent, write_output_to
    from geartrain_parallel.collective_order import CollectiveOrder
    from geartrain_parallel.collectives import (
        average_gradients,
        broadcast_object,
        broadcast_weights,
        gather_uneven,
        name_absent_ranks,
        refuse_sparse,
        refuse_unequal,
    )
    from geartrain_parallel.failures import Failure, describe_exit, is_connection
    from geartrain_parallel.headers import announce_reduction
    from geartrain_parallel.launching import join, launch, reserve, threads, variables
    from geartrain_parallel.optimizer_parts import steps_in_parts
    from geartrain_parallel.patience import Patience
    from geartrain_parallel.ranks import SeveralRanks
    from geartrain_parallel.reports import ERROR_FILE, report
    from geartrain_parallel.rerun_command import reason_not_rerunnable
    from geartrain_parallel.sharding import shard
    from geartrain_parallel.signals import SIGNALS, raise_on_signals
    from geartrain_parallel.strategy import ProcessGroupStrategy
    from geartrain_parallel.supervisor import RankHandle, Supervisor

#: Module -> its names, as above.
_NAMES = {
    "geartrain.plugin_api": "ClusterEnvironment detect",
    "geartrain_parallel": "bootstrap nodes rendezvous sockets",
    "geartrain_parallel.absent": "absent_weights",
    "geartrain_parallel.collective_order": "CollectiveOrder",
    "geartrain_parallel.bootstrap": "die_with_parent write_output_to",
    "geartrain_parallel.collectives": (
        "average_gradients broadcast_object broadcast_weights gather_uneven name_absent_ranks"
        " refuse_sparse refuse_unequal"
    ),
    "geartrain_parallel.failures": "Failure describe_exit is_connection",
    "geartrain_parallel.headers": "announce_reduction",
    "geartrain_parallel.launching": "join launch reserve threads variables",
    "geartrain_parallel.optimizer_parts": "steps_in_parts",
    "geartrain_parallel.patience": "Patience",
    "geartrain_parallel.ranks": "SeveralRanks",
    "geartrain_parallel.reports": "ERROR_FILE report",
    "geartrain_parallel.rerun_command": "reason_not_rerunnable",
    "geartrain_parallel.sharding": "shard",
    "geartrain_parallel.signals": "SIGNALS raise_on_signals",
    "geartrain_parallel.strategy": "ProcessGroupStrategy",
    "geartrain_parallel.supervisor": "RankHandle Supervisor",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "ERROR_FILE",
    "SIGNALS",
    "ClusterEnvironment",
    "CollectiveOrder",
    "Failure",
    "Patience",
    "ProcessGroupStrategy",
    "RankHandle",
    "SeveralRanks",
    "Supervisor",
    "absent_weights",
    "announce_reduction",
    "average_gradients",
    "bootstrap",
    "broadcast_object",
    "broadcast_weights",
    "describe_exit",
    "detect",
    "die_with_parent",
    "gather_uneven",
    "is_connection",
    "join",
    "launch",
    "name_absent_ranks",
    "nodes",
    "raise_on_signals",
    "reason_not_rerunnable",
    "refuse_sparse",
    "refuse_unequal",
    "rendezvous",
    "report",
    "reserve",
    "shard",
    "sockets",
    "steps_in_parts",
    "threads",
    "variables",
    "write_output_to",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    value = (
        import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
