"""``--plugin gradient_norm``: log the norm of the gradients as ``grad_norm``."""

import torch

from geartrain import hookimpl


class GradientNorm:
    """Measure the gradients that the optimizer will use, after the strategy reduced them.

    Args:
        norm_type: 2 for the Euclidean norm, 1 for the sum of magnitudes.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = norm_type

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run):
        result = yield  # the strategy reduces here
        gradients = [p.grad.flatten() for p in run.module.parameters() if p.grad is not None]
        run.log("grad_norm", torch.linalg.vector_norm(torch.cat(gradients), self.norm_type))
        return result
