"""One program of two ranks: manual optimisation, loops of one's own with a Session, closures, mixed precision. Beside it the same by
hand comes from the files of the tests of ddp, which ``sys.path`` has."""

import sys

import torch
from cases import Gentle, Net, samples
from manual import STEPS, on_ranks
from session_cases import CASES, loop
from torch.utils.data import DataLoader

import geartrain as gt


class Overflows(Net):
    """In the second step rank 1's gradients are infinite in float16: all ranks skip it together."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * 0.01
        return loss * float("inf") if batch_idx == 1 and self.trainer.global_rank == 1 else loss


def options(**more):
    return {"strategy": "horovod", "accelerator": "cpu", "devices": 2, "strategy_options": {"scale_lr": False, **more}}


def trainer(own=None, **more):
    return gt.Trainer(**options(**(own or {})), enable_progress_bar=False, max_epochs=1, **more)


def fit(module, own=None, **more):
    one = trainer(own, **more)
    one.fit(module, DataLoader(samples(), 4))
    return {"step": one.global_step, "metrics": dict(one.callback_metrics), **{k: v.clone() for k, v in module.state_dict().items()}}


def session(name, **own):
    more = {key: value for key, value in CASES[name][1].items() if key != "strategy_options"}
    with gt.Session(**options(**own), **more) as one:
        one.launch()
        return loop(one, name)


def main(folder):
    kept = {("manual", how): on_ranks(how, trainer(), samples()) for how in STEPS}
    passes = {"distributed_optimizer": True, "backward_passes_per_step": 1}
    kept["manual", "horovod's own"] = on_ranks("clipping", trainer(passes), samples())
    kept |= {("session", name): session(name) for name in CASES}
    kept["session", "horovod's own"] = session("clipped", distributed_optimizer=True)
    for name, made in (("lbfgs", Net("lbfgs")), ("two", Net("two")), ("gentle", Gentle()), ("overflow", Overflows())):
        more = {"precision": "16-mixed"} if name in ("gentle", "overflow") else {}
        kept["fit", name] = fit(made, **more)
    kept["fit", "lbfgs, horovod's own"] = fit(Net("lbfgs"), {"distributed_optimizer": True})
    one = trainer()
    one.validate(Net(), DataLoader(samples(), 4))
    torch.save(kept, f"{folder}/own-{one.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
