"""``--plugin forgetful``: gradient-norm without ``wrapper=True``, which would silently switch off the strategy's own reduction."""

import torch

from geartrain import hookimpl


class ForgetfulObserver:
    """What one writes before having read about wrappers."""

    @hookimpl
    def reduce_gradients(self, run):
        norm = torch.linalg.vector_norm(
            torch.cat([p.grad.flatten() for p in run.module.parameters()])
        )
        run.log("grad_norm", norm)
        return norm
