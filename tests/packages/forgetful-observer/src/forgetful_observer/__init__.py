"""``--plugin forgetful``: gradient-norm without ``wrapper=True``; it would replace the strategy."""

import torch

from geartrain import hookimpl


class ForgetfulObserver:
    """A typical first version, written without knowing wrappers."""

    @hookimpl
    def reduce_gradients(self, run):
        norm = torch.linalg.vector_norm(
            torch.cat([p.grad.flatten() for p in run.module.parameters()])
        )
        run.log("grad_norm", norm)
        return norm
