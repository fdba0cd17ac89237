"""The torchmetrics objects of the modules in these tests."""

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef

BOTH, EPOCH = {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}
UPDATED = ("pearson", "rank")


def classes(values):
    return (values[:, 0] * 2).long().clamp(-1, 1) + 1


def of_the_first(values):
    return values[0]


class First(Metric):
    """The first target of each epoch: depends on the order of samples; needs the whole state."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("first", torch.tensor(float("nan")), dist_reduce_fx=of_the_first)

    def update(self, preds, target):
        if self.first.isnan():
            self.first = target.flatten()[0].clone()

    def compute(self):
        return self.first


class Measures:
    """Mixin with metrics whose value is no mean over parts (F1, correlation).

    Some are called, some only updated.
    """

    def __init__(self):
        super().__init__()
        for stage in ("fit", "val"):
            metrics = torch.nn.ModuleDict(
                {
                    "accuracy": MulticlassAccuracy(3),
                    "mse": MeanSquaredError(squared=False),
                    "pearson": PearsonCorrCoef(),
                    "rank": SpearmanCorrCoef(),
                    "first": First(),
                }
            )
            each = {"precision": MulticlassPrecision(3), "f1": MulticlassF1Score(3)}
            self.add_module(stage, metrics)
            self.add_module(f"{stage}_each", MetricCollection(dict(each), prefix=f"{stage}_each/"))
            self.add_module(
                f"{stage}_updated", MetricCollection(dict(each), prefix=f"{stage}_updated/")
            )

    def measure(self, stage, batch):
        x, y = batch
        prediction, metrics = self(x).detach(), getattr(self, stage)
        for name, metric in metrics.items():
            if name == "accuracy":
                metric(classes(prediction), target=classes(y))
            elif name in UPDATED:
                metric.update(prediction[:, 0], y[:, 0])
            else:
                metric(prediction, y)
            self.log(f"{stage}_{name}", metric, **(EPOCH if name in UPDATED else BOTH))
        getattr(self, f"{stage}_each")(classes(prediction), classes(y))
        self.log_dict(getattr(self, f"{stage}_each"), **BOTH)
        getattr(self, f"{stage}_updated").update(classes(prediction), classes(y))
        self.log_dict(getattr(self, f"{stage}_updated"), **EPOCH)

    def training_step(self, batch, batch_idx):
        self.measure("fit", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.measure("val", batch)


STEPS = [f"fit_{name}_step" for name in ("accuracy", "mse", "first")] + [
    f"fit_each/{name}_step" for name in ("precision", "f1")
]
