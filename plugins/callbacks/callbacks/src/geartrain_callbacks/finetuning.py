"""``backbone_finetuning`` and its base class: freeze layers, and train them from an epoch on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import parameters_of, warn
from geartrain_callbacks.callback import Adapter, Callback
from geartrain_callbacks.later_groups import check_optimizer, check_scheduler, following

if TYPE_CHECKING:
    from geartrain import Module, Trainer

#: A module, or nested lists and dicts of modules.
Modules = nn.Module | Iterable[Any]


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze layers and train them later.

    Override :meth:`freeze_before_training` and :meth:`finetune_function`. The optimizer gets only
    the parameters that train: ``Adam(p for p in self.parameters() if p.requires_grad)``.

    torch's schedulers go on with the groups that ``finetune_function`` adds and the rates that it
    sets. A scheduler that cannot, or an optimizer that cannot step such a group, is an error when
    the group is added. Of a scheduler a warning comes before training, if this callback froze
    parameters that no optimizer has.

    A run that resumes calls ``finetune_function`` again for each epoch before, which restores the
    groups of the optimizers; their rates then come from the checkpoint.

    With several ranks the strategy must allow parameters that get no gradient: for ddp and
    ddp_spawn ``find_unused_parameters=True``.

    Source: ``BaseFinetuning`` of PyTorch Lightning.
    """

    def freeze_before_training(self, pl_module: Module) -> None:
        """Freeze layers. Called in each process, before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__}.freeze_before_training")

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze layers. Called at the start of each epoch for each optimizer.

        Args:
            epoch: the epoch, from 0. What is done must depend on nothing else.
        """
        raise NotImplementedError(f"{type(self).__name__}.finetune_function")

    def as_plugin(self) -> Adapter:
        """Return the plugin that calls this callback."""
        return _FinetuningAdapter(self)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        run = self._geartrain_run
        assert run is not None
        if (
            run.loop.resumed is None or not run.loop.resumed.batch_idx
        ):  # otherwise the resume called it
            self._finetune(run, run.epoch)

    def _finetune(self, run: Run, epoch: int) -> None:
        schedulers = [schedule.scheduler for schedule in run.schedulers]
        before = [len(optimizer.param_groups) for optimizer in run.optimizers]
        with following(schedulers):
            for optimizer in run.optimizers:
                self.finetune_function(run.module, epoch, optimizer)
        name = type(self).__name__
        for optimizer, count in zip(run.optimizers, before, strict=True):
            added = [p for group in optimizer.param_groups[count:] for p in group["params"]]
            if added:
                check_optimizer(name, optimizer, added)
                for scheduler in schedulers:
                    check_scheduler(name, scheduler, 0)

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules without children and those that have parameters of their own."""
        found = [part for module in _each(modules) for part in module.modules()]
        return [module for module in found if not list(module.children()) or module._parameters]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """Yield the parameters whose ``requires_grad`` is as given, each once.

        Args:
            train_bn: ``False`` leaves out those of BatchNorm.
        """
        seen: set[int] = set()
        for flatten_module in BaseFinetuning.flatten_modules(modules):
            if isinstance(flatten_module, _BatchNorm) and not train_bn:
                continue
            for parameter in flatten_module.parameters(recurse=False):
                if parameter.requires_grad == requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze the parameters; BatchNorm updates its statistics again."""
        for flatten_module in BaseFinetuning.flatten_modules(modules):
            _set_frozen(flatten_module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters.

        Args:
            train_bn: ``True`` leaves BatchNorm trainable.
        """
        for flatten_module in BaseFinetuning.flatten_modules(modules):
            _set_frozen(flatten_module, not (train_bn and isinstance(flatten_module, _BatchNorm)))

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a new group.

        Args:
            lr: the group's learning rate; default: that of the first group divided by
                ``initial_denom_lr``.
            train_bn: ``False`` leaves BatchNorm's parameters out of the group.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        if not rate:
            message = "the unfrozen parameters get the rate 0, a share of the first group's"
            warn(f"{message}, and do not train. Fix: a later epoch, or a rate of their own")
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = list(BaseFinetuning.filter_params(modules, train_bn=train_bn))
        new = [parameter for parameter in found if id(parameter) not in known]
        if len(new) < len(found):
            message = (
                f"{len(found) - len(new)} of {len(found)} unfrozen parameters are in a group of"
            )
            hint = "give configure_optimizers only parameters with requires_grad"
            warn(f"{message} {type(optimizer).__name__} already. Fix: {hint}")
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Freeze ``module.backbone``, and train it from an epoch on with its own learning rate.

    Args:
        unfreeze_backbone_at_epoch: the epoch, from 0.
        lambda_func: epoch, from 1 -> factor of the backbone's rate in each epoch after that.
        backbone_initial_ratio_lr: the backbone's first rate over that of the first group.
        backbone_initial_lr: the backbone's first rate; default: by the ratio.
        should_align: True: the rate grows no further than that of the first group.
        train_bn: True: BatchNorm of the backbone trains from the start.

    Raises:
        UsageError: an argument is out of range, or the module has no ``backbone``.

    Source: ``BackboneFinetuning`` of PyTorch Lightning.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        train_bn: bool = True,
    ) -> None:
        epoch = unfreeze_backbone_at_epoch
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            message = f"backbone_finetuning: unfreeze_backbone_at_epoch={epoch!r}"
            raise UsageError(f"{message} must be a whole number, at least 0.")
        for name, rate in (
            ("backbone_initial_ratio_lr", backbone_initial_ratio_lr),
            ("backbone_initial_lr", backbone_initial_lr),
        ):
            if rate is not None and (type(rate) not in (int, float) or not rate > 0):
                raise UsageError(f"backbone_finetuning: {name}={rate!r} must be a number above 0.")
        self.unfreeze_backbone_at_epoch, self.lambda_func = epoch, lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr, self.should_align = backbone_initial_lr, should_align
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Module) -> None:
        if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            message = f"backbone_finetuning: {type(pl_module).__name__} has no module 'backbone'"
            raise UsageError(f"{message}. Fix: self.backbone = ..., or extend BaseFinetuning")
        self.freeze(pl_module.backbone, self.train_bn)

    def _later(self, run: Run) -> list[nn.Parameter]:
        """Return the parameters that the run's optimizers will get."""
        if -1 < run.plan.options.max_epochs <= self.unfreeze_backbone_at_epoch:
            return []
        backbone = run.module.backbone
        return list(self.filter_params(backbone, self.train_bn, requires_grad=False))

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        first, last = optimizer.param_groups[0], optimizer.param_groups[-1]
        if epoch == self.unfreeze_backbone_at_epoch:
            ratio, rate = self.backbone_initial_ratio_lr, self.backbone_initial_lr
            rate = first["lr"] * ratio if rate is None else rate
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, rate, train_bn=self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and last is not first:
            factor = 2.0 if self.lambda_func is None else self.lambda_func(epoch + 1)
            most = first["lr"] if self.should_align else float("inf")
            last["lr"] = min(last["lr"] * factor, most)


class _FinetuningAdapter(Adapter):
    """The plugin of a finetuning callback: it freezes, and restores the groups after a resume."""

    callback: BaseFinetuning
    #: The parameters that the callback froze before training.
    _frozen: Sequence[nn.Parameter] = ()

    @hookimpl(wrapper=True)
    def setup_process_group(self, run: Run) -> Generator[None, Any, Any]:
        world = yield
        waits = world.size > 1 and not run.hooks.strategy_can("unused_parameters")
        if waits and run.command == "fit":
            raise UsageError(
                f"{type(self.callback).__name__} freezes parameters, and the strategy "
                f"{run.plan.strategy.name} waits for the gradient of each. "
                "Fix: find_unused_parameters=True of the strategy "
                "(--strategy.find_unused_parameters true)"
            )
        return world

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, Any, Any]:
        model = yield
        # After the wrapper, which looks only for parameters that have a gradient when it is made.
        if run.command == "fit":
            trained = [p for p in run.module.parameters() if p.requires_grad]
            self.callback.freeze_before_training(run.module)
            self._frozen = [p for p in trained if not p.requires_grad]
        return model

    @hookimpl(wrapper=True)
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Generator[None, Any, Any]:
        if isinstance(self.callback, BackboneFinetuning) and run.command == "fit":
            name, later = type(self.callback).__name__, self.callback._later(run)
            if later:
                check_optimizer(name, optimizer, later)
                for schedule in run.schedulers:
                    check_scheduler(name, schedule.scheduler, 1)
        return (yield)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        stepped = set(parameters_of(run.optimizers))
        if isinstance(self.callback, BackboneFinetuning) or stepped.issuperset(self._frozen):
            return
        for schedule in run.schedulers:
            try:
                check_scheduler(type(self.callback).__name__, schedule.scheduler, 1)
            except UsageError as error:  # a warning, because finetune_function may add no group
                if run.world.rank == 0:
                    warn(f"{error}. Otherwise finetune_function must add no group")

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        state = yield
        fit = state.get("fit") if isinstance(state, dict) else None
        if run.command == "fit" and run.plan.resumes and isinstance(fit, Mapping):
            begun = fit.get("epoch", 0) + bool(fit.get("batch_idx"))
            for epoch in range(begun):
                self.callback._finetune(run, epoch)
        return state


def _each(modules: Modules) -> Iterator[nn.Module]:
    if isinstance(modules, nn.ModuleDict | Mapping):
        modules = modules.values()
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        yield modules
    elif isinstance(modules, Iterable):
        for module in modules:
            yield from _each(module)


def _set_frozen(one: nn.Module, frozen: bool) -> None:
    if isinstance(one, _BatchNorm) and one.running_mean is not None:
        one.track_running_stats = not frozen
    for parameter in one.parameters(recurse=False):
        parameter.requires_grad = not frozen
