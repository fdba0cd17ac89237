"""The properties that a Trainer and a Session share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.hooks.plugin_info import LoadedPlugin
    from geartrain.launch.cluster import ClusterEnvironment
    from geartrain.loop.run import Run
    from geartrain.plan import Plan


class RankProperties:
    """Ranks are those of the running Run, otherwise of the launcher's environment."""

    plan: Plan
    cluster: ClusterEnvironment | None
    _run: Run | None
    _parts: Sequence[LoadedPlugin]

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
        plugins = (part.plugin for part in self._parts)
        return [plugin for plugin in plugins if hasattr(type(plugin), "experiment")]

    @property
    def logger(self) -> Any:
        """The first of ``loggers``, or ``None``."""
        return next(iter(self.loggers), None)
