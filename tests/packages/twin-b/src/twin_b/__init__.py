"""``--plugin twin``: two packages have this name."""

from geartrain import hookimpl


class Twin:
    """The twin of twin-b."""

    @hookimpl
    def on_run_start(self):
        print("twin b is here")
