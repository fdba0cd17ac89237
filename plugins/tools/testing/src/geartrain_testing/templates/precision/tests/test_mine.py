"""Train a module with the precision, on two ranks in this process."""

from __future__ import annotations

import geartrain as gt
import torch
from geartrain.testing import run_plugin


class Slope(gt.Module):
    """A layer that notes the dtype of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        output = self.layer(torch.ones(2, 4, device=self.device))
        self.dtypes.add(output.dtype)
        return torch.nn.functional.mse_loss(output, torch.zeros_like(output))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    for rank in run_plugin(precision="mine", module=Slope(), max_steps=2):
        module = rank.module
        assert isinstance(module, Slope)
        assert module.dtypes == {torch.bfloat16}
        assert module.layer.weight.dtype == torch.float32
        assert module.layer.weight.isfinite().all()
