"""``--plugin twin``: two packages have this name."""

from geartrain import hookimpl


class Twin:
    """The twin of twin-a."""

    @hookimpl
    def on_run_start(self):
        print("twin a is here")
