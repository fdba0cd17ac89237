"""Where a Trainer or a Session stands among the processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.launch.cluster import Place
    from geartrain.loop.run import Run
    from geartrain.plan import Plan


class Placed:
    """What a Trainer and a Session say of this process: the run's word, and before it begins that of whoever started the process."""

    plan: Plan
    place: Place | None
    _run: Run | None

    @property
    def global_rank(self) -> int:
        return self._run.world.rank if self._run else self.place.rank if self.place else 0

    @property
    def local_rank(self) -> int:
        return self._run.world.local_rank if self._run else self.place.local_rank if self.place else 0

    @property
    def world_size(self) -> int:
        return self._run.world.size if self._run else self.plan.processes or 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0
