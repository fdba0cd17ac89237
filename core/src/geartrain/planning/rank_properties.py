"""The rank properties that a Trainer and a Session share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.launch.cluster import ClusterEnvironment
    from geartrain.loop.run import Run
    from geartrain.plan import Plan


class RankProperties:
    """Rank properties: from the running Run, otherwise from the launcher's environment."""

    plan: Plan
    cluster: ClusterEnvironment | None
    _run: Run | None

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
