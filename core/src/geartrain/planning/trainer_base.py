"""The base class of Trainer and Session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from geartrain.hooks.manager import Hooks
from geartrain.planning.components import Setup

if TYPE_CHECKING:
    from geartrain.launch.cluster import ClusterEnvironment
    from geartrain.loop.run import Run
    from geartrain.plan import Plan


class TrainerBase:
    """The base class of Trainer and Session: parts and plan by ``arguments`` of a Trainer, ranks.

    Ranks are those of the running Run, otherwise of the launcher's environment.
    """

    #: True if rank 0's folder may have another number than this rank's, which then takes it.
    takes_folder_of_rank_0 = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        #: The parts and the plan; another process gets them as this value.
        self._setup = Setup.of(arguments)
        self.hooks = Hooks(self._setup.parts)
        self._run: Run | None = None

    @property
    def plan(self) -> Plan:
        """The decisions before anything started."""
        return self._setup.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._setup = replace(self._setup, plan=plan)

    @property
    def cluster(self) -> ClusterEnvironment | None:
        """The place of this process among the launcher's; ``None`` if it is alone."""
        return self._setup.cluster

    @cluster.setter
    def cluster(self, cluster: ClusterEnvironment | None) -> None:
        self._setup = replace(self._setup, cluster=cluster)

    @property
    def global_rank(self) -> int:
        """The rank of this process among all, from 0."""
        place = self._run.world if self._run else self.cluster
        return place.rank if place else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node, from 0."""
        place = self._run.world if self._run else self.cluster
        return place.local_rank if place else 0

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self._run.world.size if self._run else self.plan.processes or 1

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.global_rank == 0

    @property
    def loggers(self) -> list[Any]:
        """The loggers that have an ``experiment``, their own object: TensorBoard's writer etc."""
        plugins = (part.plugin for part in self._setup.parts)
        return [plugin for plugin in plugins if hasattr(type(plugin), "experiment")]

    @property
    def logger(self) -> Any:
        """The first of ``loggers``, or ``None``."""
        return next(iter(self.loggers), None)
