"""The hook that this package brings."""

from geartrain import hookspec


@hookspec
def on_stall(run, epochs):
    """The loss has not fallen for some epochs."""
