"""One node of a ddp2 run of two; what it came to is kept in a file."""

import os

import torch
from cases import CASES, Contrastive, Curve, Net, one_trainer, samples, train, weights
from measures import Measures
from torch.utils.data import DataLoader
from torchmetrics.regression import MeanSquaredError

import geartrain as gt


class Uneven(Net):
    """Nodes have unequal numbers of parts, and evaluation gathers over the nodes where that is allowed."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        return batch[0][:, 0]

    def validation_step_end(self, outputs):
        parts.append(len(outputs))
        gathered = self.all_gather(torch.cat(outputs))
        rows.append(sum(len(part) for part in gathered))
        return outputs


class Gathering(Net):
    def training_step(self, batch, batch_idx):
        self.all_gather(batch[0])


class Measured(Measures, Net):
    pass


class OnStep(Net):
    def __init__(self):
        super().__init__()
        self.mse = MeanSquaredError(dist_sync_on_step=True)


found, parts, rows, reductions, through_ddp = {"cases": {}}, [], [], [], set()
nodes = {"num_nodes": 2, "strategy": "ddp2"}
for name, (_, _, size, _) in CASES.items():
    if size % 2 == 0:
        options = {"strategy_options": {"find_unused_parameters": True}} if "unused" in name else {}
        trainer, curve, trained = train(name, batch_size=size // 2, **nodes, **options)
        found["cases"][name] = (curve, trained)
found["batch"] = (trainer.plan.global_batch, trainer.plan.per_device_batch, trainer.world_size)


class Counting:
    @gt.hookimpl(wrapper=True)
    def wrap_model(self, run):
        model = yield
        model.register_comm_hook(None, reduced)
        model.register_forward_pre_hook(lambda ddp, args: through_ddp.add(args[0]))
        return model


def reduced(state, bucket):
    reductions.append(bucket.index())
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


trainer = one_trainer(devices=2, accumulate_grad_batches=3, plugins=[Counting()], **nodes)
trainer.fit(Net(), DataLoader(samples(), batch_size=4), DataLoader(samples(), batch_size=4))
found["reductions"], found["through DDP"] = (len(reductions), trainer.global_step), through_ddp

module = Uneven()
val = DataLoader(samples(15), batch_size=4)  # nodes of 8 and 7 samples: the last batch is 4 on one, 3 on the other
trainer = one_trainer(devices=4, **nodes)
trainer.fit(module, DataLoader(samples(), batch_size=4), val)
found["fit's own validation"] = dict(trainer.callback_metrics)
found["validated"] = trainer.validate(module, val)[0]
found["parts"], found["rows"] = parts, rows
found["predictions"] = len(trainer.predict(module, val))
found["weights"] = weights(module)

module, curve = Contrastive(), Curve("loss_step")
trainer = one_trainer(devices=2, plugins=[curve], **nodes)
trainer.fit(module, DataLoader(samples(), batch_size=6), DataLoader(samples(20), batch_size=5))
found["contrastive"] = (curve.values, weights(module), dict(trainer.callback_metrics))

trainer = one_trainer(devices=2, **nodes)
trainer.fit(Measured(), DataLoader(samples(), batch_size=3), DataLoader(samples(25), batch_size=3))
found["measured"] = dict(trainer.callback_metrics)
try:
    one_trainer(devices=2, **nodes).fit(OnStep(), DataLoader(samples(), batch_size=4))
except gt.TrainingError as error:
    found["on step"] = str(error)

try:
    one_trainer(devices=2, **nodes).fit(Gathering(), DataLoader(samples(), batch_size=4))
except gt.TrainingError as error:
    found["gathering"] = str(error)
torch.save(found, f"kept-{os.environ['NODE_RANK']}.pt")
