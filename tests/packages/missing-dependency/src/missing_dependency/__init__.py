"""``--accelerator missing_dependency``: it needs a vendor's runtime that is not installed."""

import geartrain_test_absent_runtime as runtime

from geartrain import hookimpl


class WarpAccelerator:
    """An accelerator of some vendor."""

    priority = 100

    @staticmethod
    def unavailable() -> str | None:
        return None if runtime.count() else "no device was found"

    @staticmethod
    def device_count() -> int:
        return runtime.count()

    @hookimpl
    def setup_device(self, local_rank):
        return runtime.device(local_rank)
