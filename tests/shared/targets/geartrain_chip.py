"""The module of the test distribution ``geartrain-chip``: plugins that print their options."""

from geartrain import Layout, hookimpl


class Chip:
    """An accelerator with four devices, all of which are the CPU."""

    priority = -1

    def __init__(self, turbo: bool = False):
        self.turbo = turbo

    @staticmethod
    def unavailable():
        return None

    @staticmethod
    def device_count():
        return 4

    @hookimpl
    def teardown_device(self):
        print("turbo", self.turbo)


class Scaled:
    """A strategy of one process with any number of devices."""

    def __init__(self, scale: float = 1.0, in_units: str = "ms"):
        self.words = f"scale {scale} {in_units}"

    @hookimpl
    def plan_processes(self, request):
        return Layout(1, len(request.devices))

    @hookimpl
    def barrier(self):
        print(self.words)


class Bell:
    """A plugin that prints a word when a run starts."""

    def __init__(self, sound: str = "ding", times: int = 1):
        self.words = sound * times

    @hookimpl
    def on_run_start(self):
        print(self.words)
