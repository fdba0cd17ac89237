"""Two ranks train with QAdam past its warm-up; each saves its weights and momenta."""

import os

import torch
from cases import Net, bagua, samples
from torch.utils.data import DataLoader

from geartrain_bagua import QAdamOptimizer


class Q(Net):
    def configure_optimizers(self):
        others = [*self.second.parameters(), *self.extra.parameters(), *self.last.parameters()]
        groups = [
            {"params": [*self.first.parameters()], "betas": (0.8, 0.99), "weight_decay": 0.1},
            {"params": others},
        ]
        warmup_steps = 4 if self.trainer.plan.options.accumulate_grad_batches == 1 else 2
        self.made = QAdamOptimizer(groups, lr=0.01, warmup_steps=warmup_steps)
        return self.made


found = {}
for name, options in {"flat": {}, "accumulating": {"accumulate_grad_batches": 3}}.items():
    module = Q()
    trainer = bagua(
        strategy={"algorithm": "qadam", "bucket_bytes": 300, "hierarchical": False},
        max_epochs=2,
        **options,
    )
    trainer.fit(module, DataLoader(samples(), 4))
    found[name] = {key: value.clone() for key, value in module.state_dict().items()}
    found["mixed", name] = module.made.momentum_is_mixed
    found["momentum", name] = torch.cat(
        [module.made.state[p]["exp_avg"].flatten() for p in module.parameters()]
    )
torch.save(found, f"kept-{os.environ['RANK']}.pt")
