"""One program of two ranks: manual optimisation, Sessions, closures and mixed precision.

The cases come from the tests of ddp, so ``sys.path`` must contain the parent folder of ``tests``.
"""

import gc
import sys

import torch
import torch._dynamo  # which optimizers import
from tests.ddp.cases import Net, samples
from tests.ddp.manual import STEPS, on_ranks
from tests.ddp.session_cases import CASES, loop
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import geartrain as gt

#: The suffix of cases that hvd.DistributedOptimizer reduces.
OWN = "horovod's optimizer"


class Overflows(Net):
    """In the second step rank 1's gradients overflow float16, so all ranks skip the step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.trainer.global_rank == 1 else loss


def options(**more):
    return {
        "strategy": "horovod",
        "accelerator": "cpu",
        "devices": 2,
        "strategy_options": {"scale_lr": False, **more},
    }


def trainer(own=None, **more):
    return gt.Trainer(**options(**(own or {})), enable_progress_bar=False, max_epochs=1, **more)


def fit(module, own=None, **more):
    one = trainer(own, **more)
    one.fit(module, DataLoader(samples(), 4))
    return {
        "step": one.global_step,
        "metrics": dict(one.run.metrics),
        **{k: v.clone() for k, v in module.state_dict().items()},
    }


def session(name, **own):
    more = {key: value for key, value in CASES[name][1].items() if key != "strategy_options"}
    with gt.Session(**options(**own), **more) as one:
        one.launch()
        return loop(one, name)


def two_models(**own):
    """Train two models with the same parameter names; the second takes twice as many steps."""
    with gt.Session(**options(**own)) as one:
        one.launch()
        pairs = [one.setup(net, net.configure_optimizers()) for net in (Net(), Net("adam"))]
        for i, (x, y) in enumerate(one.setup_dataloaders(DataLoader(samples(), 4))):
            now = pairs if i % 2 else pairs[1:]
            for model, optimizer in now:
                optimizer.zero_grad()
                one.backward(mse_loss(model(x), y))
            for _, optimizer in now:
                optimizer.step()
        return {
            f"{i}.{k}": v.clone()
            for i, (model, _) in enumerate(pairs)
            for k, v in model.module.state_dict().items()
        }


def main(folder):
    kept = {("manual", how): on_ranks(how, trainer(), samples()) for how in STEPS}
    kept |= {("session", name): session(name) for name in CASES}
    kept |= {
        ("session", f"{name}, {OWN}"): session(name, distributed_optimizer=True) for name in CASES
    }
    kept |= {
        ("manual", f"{how}, {OWN}"): on_ranks(
            how, trainer({"distributed_optimizer": True}), samples()
        )
        for how in STEPS
    }
    kept["session", "two models"] = two_models()
    kept["session", f"two models, {OWN}"] = two_models(distributed_optimizer=True)
    for name, make in (
        ("lbfgs", lambda: Net("lbfgs")),
        ("two", lambda: Net("two")),
        ("gentle", Net),
        ("overflow", Overflows),
    ):
        more = {"precision": "16-mixed"} if name in ("gentle", "overflow") else {}
        kept["fit", name] = fit(make(), **more)
        kept["fit", f"{name}, {OWN}"] = fit(make(), {"distributed_optimizer": True}, **more)
    one = trainer()
    one.validate(Net(), DataLoader(samples(), 4))
    torch.save(kept, f"{folder}/own-{one.global_rank}.pt")


if __name__ == "__main__":
    gc.freeze()  # each run collects garbage at its end
    main(sys.argv[1])
