"""Errors in training."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist

from geartrain import hookimpl
from geartrain_wrong.plain import Plain, average


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
        step = run.unwrapped
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
    """Lists are broadcast only to rank 0."""

    @hookimpl
    def broadcast(self, run, obj, src):
        from geartrain.parallel import broadcast_object

        theirs = broadcast_object(run, obj, src)
        mine = [buffer.clone() for buffer in run.module.buffers()]
        return mine if isinstance(theirs, list) and mine else theirs


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
