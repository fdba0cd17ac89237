"""``--strategy polite``: train in one process and use only a part of each gradient."""

from geartrain import hookimpl


class PoliteStrategy:
    """A strategy with one hook; core's defaults implement the others.

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
