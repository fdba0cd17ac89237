"""``--strategy polite``: trains in one process, and takes no more than its share of each gradient."""

from geartrain import hookimpl


class PoliteStrategy:
    """Every hook that is not here stays core's default.

    Args:
        scale: the part of each gradient to keep.
    """

    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)

    @hookimpl
    def barrier(self):
        print("polite: after you")
