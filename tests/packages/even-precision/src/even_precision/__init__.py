"""``--precision even``: each gradient is rounded to a multiple of two."""

from geartrain import hookimpl


class EvenPrecision:
    @hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        result = yield
        for parameter in run.module.parameters():
            parameter.grad.copy_((parameter.grad / 2).round() * 2)
        return result
