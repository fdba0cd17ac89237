"""``--plugin twin``: there are two of them."""

from geartrain import hookimpl


class Twin:
    """The one from twin-b."""

    @hookimpl
    def on_run_start(self):
        print("twin b is here")
