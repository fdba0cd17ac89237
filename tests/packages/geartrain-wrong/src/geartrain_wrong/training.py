"""Errors in training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist

from geartrain import hookimpl
from geartrain_wrong.plain import Plain, average, used


class Sums(Plain):
    """Gradients are summed, but not divided."""

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if parameter.requires_grad:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                dist.all_reduce(parameter.grad)


class TrainsAlone(Plain):
    """The ranks are connected, but each keeps its own gradients."""

    @hookimpl
    def reduce_gradients(self): ...


class SkipsTheLastBucket(Plain):
    """Parameters too large for the bucket are not reduced."""

    @hookimpl
    def reduce_gradients(self, run):
        average(run, [p for p in run.module.parameters() if p.numel() < 100_000])


class ForgetsEarlierMicroBatches(Plain):
    """The gradient buffer is cleared at each micro-batch."""

    @hookimpl
    @contextmanager
    def micro_step(self, run):
        for parameter in run.module.parameters():
            parameter.grad = None
        yield


class ClipsFirst(Plain):
    """Each rank clips its gradients before they are averaged."""

    @hookimpl
    def reduce_gradients(self, run):
        most = run.plan.options.gradient_clip_val
        if most is not None:
            torch.nn.utils.clip_grad_norm_(run.module.parameters(), most)
        average(run, run.module.parameters())

    @hookimpl
    def clip_gradients(self):
        return None


class StepsAdamAsSGD(Plain):
    """Only one optimizer is supported."""

    @hookimpl
    def optimizer_step(self, run, optimizer):
        if not isinstance(optimizer, torch.optim.Adam):
            optimizer.step()
            return
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["lr"] * parameter.grad


class FirstOptimizerOnly(Plain):
    """Only parameters of the first optimizer are averaged."""

    @hookimpl
    def reduce_gradients(self, run):
        average(run, [p for group in run.optimizers[0].param_groups for p in group["params"]])


class NeedsEveryGradient(Plain):
    """Frozen parameters are not supported."""

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if not parameter.requires_grad:
                parameter.grad /= run.world.size
        average(run, run.module.parameters())


class DividesByUsers(Plain):
    """If only one of two ranks uses a parameter, its whole gradient is used."""

    @hookimpl
    def reduce_gradients(self, run):
        average(run, run.module.parameters(), by_users=True)


class SchedulesOncePerRank(Plain):
    """Each rank steps the schedulers for all ranks."""

    @hookimpl
    def on_step_end(self, run):
        for schedule in run.schedulers:
            for _ in range(run.world.size - 1):
                schedule.scheduler.step()


class EndsWithATuple(Plain):
    """``training_step_end`` does not get a list."""

    @hookimpl
    def forward(self, run, method, args):
        step = run.loop.unwrapped
        output = step.part(method, *args)
        return step.end(method, (output,)) if step.has_end(method) else output


class FitsOnce(Plain):
    """The communication works for one fit only."""

    fitted = False

    @hookimpl
    def reduce_gradients(self, run):
        if not self.fitted:
            average(run, run.module.parameters())

    @hookimpl
    def on_run_end(self):
        self.fitted = True


class KeepsBuffersApart(Plain):
    """Buffers are broadcast only to rank 0."""

    @hookimpl
    def broadcast(self, run, obj, src):
        from geartrain.parallel import broadcast_object

        theirs = broadcast_object(run, obj, src)
        mine = {name: buffer.clone() for name, buffer in run.module.named_buffers()}
        return mine if isinstance(theirs, dict) and theirs.keys() == mine.keys() else theirs


class StartsApart(Plain):
    """All ranks are assumed to make the same weights."""

    @hookimpl
    def wrap_model(self, run, model):
        return model


class Drifts(Plain):
    """Noise in the last digit, different on each rank."""

    @hookimpl
    def on_step_end(self, run):
        with torch.no_grad():
            for parameter in run.module.parameters():
                parameter += parameter * run.world.rank * 1e-15


class ReducesEveryMicroBatch(Plain):
    """One reduction per micro-batch; the result is correct."""

    @hookimpl
    @contextmanager
    def micro_step(self, run, last):
        yield

    @hookimpl
    def backward(self, run, loss):
        loss.backward()
        average(run, run.module.parameters())

    @hookimpl
    def reduce_gradients(self, run):
        pass


class AveragesWithANeighbour(Plain):
    """Each rank averages with the next rank only; with two ranks this is correct."""

    @hookimpl
    def reduce_gradients(self, run):
        rank, size = run.world.rank, run.world.size
        for parameter, _ in used(run.module.parameters()):
            found = [torch.empty_like(parameter.grad) for _ in range(size)]
            dist.all_gather(found, parameter.grad)
            parameter.grad = (found[rank] + found[(rank + 1) % size]) / 2


class FirstDtypeOnly(Plain):
    """One bucket, of the first parameter's dtype; other parameters are left out."""

    @hookimpl
    def reduce_gradients(self, run):
        parameters = list(run.module.parameters())
        average(run, [p for p in parameters if p.dtype == parameters[0].dtype])


class CachesParameters(Plain):
    """The parameters to average are listed once, when the run starts."""

    @hookimpl
    def on_run_start(self, run):
        self.trained = [p for p in run.module.parameters() if p.requires_grad]

    @hookimpl
    def reduce_gradients(self, run):
        average(run, self.trained)


class WeighsByBatchSize(Plain):
    """A rank with a larger batch counts more."""

    @hookimpl
    def reduce_gradients(self, run):
        mine = float(len(run.batch[0]))
        sizes = torch.tensor([mine])
        dist.all_reduce(sizes)
        for parameter, _ in used(run.module.parameters()):
            parameter.grad *= mine / sizes.item()
            dist.all_reduce(parameter.grad)


class SkipsEvery50thStep(Plain):
    """Every 50th step is lost, as to a checkpoint or a rebuilt communicator."""

    @hookimpl
    def optimizer_step(self, run, optimizer):
        if (run.step + 1) % 50:
            optimizer.step()


class Stale(Plain):
    """Each step uses the means of the step before; the last are lost."""

    before: ClassVar[dict] = {}

    @hookimpl
    def reduce_gradients(self, run):
        average(run, run.module.parameters())
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                mean = parameter.grad.clone()
                parameter.grad = self.before.get(parameter, torch.zeros_like(mean))
                self.before[parameter] = mean


class HidesNaN(Plain):
    """NaN becomes 0."""

    @hookimpl
    def reduce_gradients(self, run):
        average(run, run.module.parameters())
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()


class ForgetsItsState(Plain):
    """Sends rounded gradients, and adds the errors to the next; no checkpoint has the errors."""

    capabilities: ClassVar[dict] = {"convergence": 0.1}

    def __init__(self, timeout: float = 60.0) -> None:
        super().__init__(timeout)
        self.errors = {}

    @hookimpl
    def reduce_gradients(self, run):
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                wanted = parameter.grad + self.errors.get(parameter, 0.0)
                parameter.grad = (64 * wanted).round() / 64
                self.errors[parameter] = wanted - parameter.grad
        average(run, run.module.parameters())
