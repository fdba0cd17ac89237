"""The ``single`` strategy: one process, one device."""

from __future__ import annotations

from typing import ClassVar

from geartrain.errors import UsageError
from geartrain.hookspecs import hookimpl
from geartrain.plan import Layout, PlanRequest


class SingleDeviceStrategy:
    """Trains in this process on one device, with core's defaults for all other hooks."""

    #: The capabilities that the conformance kit may expect.
    capabilities: ClassVar[dict[str, bool]] = {"multi_node": False}

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        if len(request.devices) > 1 or request.num_nodes > 1:
            raise UsageError(
                f"geartrain[single] drives one device on one node, not {len(request.devices)} on "
                f"{request.num_nodes}. "
                "Fix: devices=1, or a strategy of several processes (--strategy ddp)"
            )
        return Layout(1, 1)
