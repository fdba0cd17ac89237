"""The hook that this package adds."""

from geartrain import hookspec


@hookspec
def on_stall(run, epochs):
    """Called if the loss has not fallen for some epochs."""
