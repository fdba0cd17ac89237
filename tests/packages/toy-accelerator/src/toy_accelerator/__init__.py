"""An accelerator for a device that torch does not know."""

import os

import torch

from geartrain import hookimpl


class ToyAccelerator:
    """Train on toy:0.

    Args:
        loud: print how many operators the device has run.
    """

    priority = 50

    def __init__(self, loud: bool = True):
        self.loud = loud

    @staticmethod
    def unavailable():
        if os.environ.get("TOY_DRIVER") == "loaded":
            return None
        return "the toy driver is not loaded. Fix: set TOY_DRIVER=loaded"

    @staticmethod
    def device_count():
        return 1

    @hookimpl
    def setup_device(self, run):
        # Imported here, because it makes "toy" a torch device in this process.
        from toy_accelerator import device

        self.device = device
        return torch.device("toy", run.plan.devices[0])

    @hookimpl
    def device_stats(self):
        return {"toy0_operators": float(self.device.ToyTensor.operators)}

    @hookimpl
    def teardown_device(self):
        if self.loud:
            print("toy: operators run:", self.device.ToyTensor.operators)
