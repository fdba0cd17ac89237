"""DeepSpeed's engine, with an optimizer and a module as one process has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, UsageError
from geartrain.parallel import absent_weights, steps_in_parts
from geartrain_deepspeed import library, pickles


class Engine:
    """An engine of DeepSpeed for one ``fit``, and what geartrain needs of it.

    DeepSpeed replaces the parameters in an optimizer's groups by flat parts of all of them. It gets
    a copy here: the user's optimizer keeps the parameters, and schedulers change its settings.

    Args:
        run: of this rank. Its module is on the device, with the weights of rank 0.
        optimizer: of the module.
        config: of DeepSpeed, complete.

    Raises:
        UsageError: the optimizer cannot work on flat parts.
    """

    def __init__(self, run: Run, optimizer: Optimizer, config: dict[str, Any]) -> None:
        self._label = f"{run.plan.strategy.label}: rank {run.world.rank}"
        has_state = bool(optimizer.state)  # of whole parameters, as Adagrad has before a step
        if run.loop.needs_closure or has_state or not steps_in_parts(optimizer, _halves, 1, False):
            message = f"{run.plan.strategy.label}: {type(optimizer).__name__} cannot step parts,"
            message += " and each rank has a flat part of all parameters"
            raise UsageError(f"{message}. Fix: SGD or AdamW, or --strategy ddp")
        self._run, self._optimizer, self._module = run, optimizer, run.module
        self._keeps = run.world.rank == 0
        self._is_partitioned = config["zero_optimization"]["stage"] == 3
        trained = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
        #: Each group of the user's that has a part in DeepSpeed's, and its trained parameters.
        self._groups = [
            (group, parameters)
            for group, parameters in zip(optimizer.param_groups, trained, strict=True)
            if parameters
        ]
        copy = object.__new__(type(optimizer))
        vars(copy).update(vars(optimizer))
        vars(copy).pop("step", None)  # a scheduler's, which counts steps
        copy.param_groups = [{**group, "params": parameters} for group, parameters in self._groups]
        copy.state = defaultdict(dict)
        deepspeed = library.load(run.plan.strategy.label, run.device.type)
        self._gathered: Callable[..., Any] = deepspeed.zero.GatheredParameters
        names = {p: name for name, p in run.module.named_parameters()}
        self._names = {p: names.get(p, "") for _, group in self._groups for p in group}
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        self._used: set[nn.Parameter] = set()
        self._allow_pickles: Callable[[], None] = lambda: None
        self._handles = [p.register_post_accumulate_grad_hook(self._used.add) for p in self._names]
        self._root = _Root(run)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=self._root, optimizer=copy, config=config
        )
        if run.world.size > 1:
            library.agree(run)
        if self._is_partitioned:
            self._allow_pickles = pickles.refuse_parts(run.module)
        self._versions = self._count_changes()
        #: How often the user has changed each parameter; empty before training.
        self._changes: list[int] = []
        optimizer.register_state_dict_post_hook(lambda _, state: self._whole_state(state))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._load_state(state))

    # --- training ---------------------------------------------------------------------------------

    def begin(self, last: bool) -> None:
        """Begin a micro-batch; ``last`` of its step."""
        self._engine.set_gradient_accumulation_boundary(last)

    def forward(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a step method; in stage 3 each submodule gathers its parameters."""
        if method != "training_step":
            return self._root(method, *args)
        # Else DeepSpeed would disable autocast; the root enables it again.
        kind = self._run.device.type
        self._root.autocasts = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            return self._engine(method, *args)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, and in stages 2 and 3 reduce them."""
        # Its assertion would hide why the loss has no gradient.
        if loss.grad_fn is None or loss.numel() != 1:
            loss.backward()  # type: ignore[no-untyped-call]
            self.check()
        try:
            self._engine.backward(loss, scale_wrt_gas=False)
        except IndexError:  # DeepSpeed's, if no parameter has got a gradient
            self.check()
            raise

    def check(self) -> None:
        """Raise if the step did not give each trained parameter a gradient.

        Raises:
            TrainingError: a parameter has none, or was frozen or unfrozen.
        """
        changed = [name for p, name in self._names.items() if not p.requires_grad]
        changed += [name for p, name in self._frozen.items() if p.requires_grad]
        if changed:
            raise TrainingError(
                f"{self._label}: requires_grad of {changed[0]} was changed, and DeepSpeed trains "
                "the parameters that it got at the start. "
                "Fix: freeze before fit, or --strategy fsdp"
            )
        unused = [name for p, name in self._names.items() if p not in self._used]
        self._used.clear()
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise TrainingError(
                f"{self._label} did not use these parameters in a step: {', '.join(unused[:5])}"
                f"{more}. Fix: use them, freeze them, or --strategy fsdp"
            )

    def step(self) -> bool:
        """Clip, step, and clear the gradients; ``False`` if these are not finite."""
        for (group, _), flat in zip(self._groups, self._zero.optimizer.param_groups, strict=True):
            flat.update({name: value for name, value in group.items() if name != "params"})
        self._keep_changes()
        self._engine.step()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        # DeepSpeed writes through .data, which nobody would notice.
        torch.autograd.graph.increment_version(list(self._names))
        self._versions = self._count_changes()
        return bool(self._engine.was_step_applied())

    def _count_changes(self) -> list[int]:
        return [parameter._version for parameter in self._names]

    def _keep_changes(self) -> None:
        """Let DeepSpeed step the weights that the user may have set; it steps a copy.

        Raises:
            TrainingError: they were set, and ranks have parts of them.
        """
        new = self._new_changes()
        if not self._is_partitioned:  # nothing counts changes through .data
            self._changes = [sum(pair) for pair in zip(self._changes, new, strict=True)]
            self._zero.refresh_fp32_params()
            return
        changed = [name for name, count in zip(self._names.values(), new, strict=True) if count]
        if changed:
            raise TrainingError(
                f"{self._label}: {changed[0]} was changed, and in stage 3 each rank has a part of "
                "it, so the change is lost. Fix: --strategy.stage 2"
            )

    def _new_changes(self) -> list[int]:
        """Return how often the user has changed each parameter since the last step."""
        pairs = zip(self._count_changes(), self._versions, strict=True)
        return [count - before for count, before in pairs]

    def begin_training(self) -> None:
        """Count the user's changes from now on: the weights of all ranks are equal."""
        self._changes = self._changes or [-count for count in self._new_changes()]

    def compare_changes(self) -> None:
        """Compare how often ranks have changed weights, of which each steps a part; a collective.

        Raises:
            TrainingError: a rank has changed one alone. The ranks have got a part of the change.
        """
        totals = [sum(pair) for pair in zip(self._changes, self._new_changes(), strict=True)]
        values = torch.tensor(totals, dtype=torch.float64)
        table = self._run.hooks.log_sync(run=self._run, values=values).tolist()
        usual = max(table, key=table.count)
        for rank, counts in enumerate(table):
            pairs = zip(self._names.values(), usual, counts, strict=True)
            changed = [name for name, expected, count in pairs if count != expected]
            if changed:
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                message = f"rank {rank} differs from rank {table.index(usual)}: the number of "
                message += f"changes of {', '.join(changed[:3])}{more}"
                raise TrainingError(
                    f"{message}. Fix: change weights on every rank, in the same way"
                )

    # --- checkpoints; each rank calls these -------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """Return the module's state, with whole parameters on rank 0."""
        state = self._module.state_dict()
        if self._is_partitioned:
            for name, parameter in self._module.named_parameters(remove_duplicate=False):
                with self._gathered(parameter):
                    if name in state:
                        value = parameter.detach()
                        state[name] = value.cpu().clone() if self._keeps else value.new_empty(0)
        return state

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Load a module's state, which each rank has, and DeepSpeed's own copy of the weights."""
        with self._gathered(list(self._module.parameters()), modifier_rank=0):
            self._module.load_state_dict(state)
        self._zero.refresh_fp32_params()
        self._versions = self._count_changes()

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the user's optimizer's state, as one process has it, on rank 0."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_states()
        numbers = self._numbers(state)
        slots: dict[int, dict[str, Any]] = {}
        for parameter, flat in self._flats():
            slot: dict[str, Any] = {}
            for name, value in self._zero.optimizer.state.get(flat, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                    value = safe_get_full_optimizer_state(parameter, name).cpu()
                    value = value.view(_shape(parameter)) if self._keeps else value.new_empty(0)
                elif isinstance(value, torch.Tensor):
                    value = value.clone()  # or all parameters would count their steps in one
                slot[name] = value
            if slot:
                slots[numbers[parameter]] = slot
        return {**state, "state": slots}

    def _load_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Give DeepSpeed its part of an optimizer's state; return the rest for the user's."""
        parts, numbers = self._zero.optimizer.state, self._numbers(state)
        saved = [(p, flat, state["state"].get(numbers[p], {})) for p, flat in self._flats()]
        for parameter, flat, slot in saved:
            for name, value in slot.items():
                if not _is_elementwise(name, value, parameter):
                    parts[flat][name] = value.clone() if isinstance(value, torch.Tensor) else value
                elif name not in parts[flat]:
                    parts[flat][name] = torch.zeros_like(flat)
        self._link_states()
        for parameter, _, slot in saved:
            for name, value in slot.items():
                if _is_elementwise(name, value, parameter):
                    self._set_state(parameter, name, value.to(parameter.device, torch.float32))
        return {**state, "state": {}}

    def _link_states(self) -> None:
        """Let stages 1 and 2 find the states of all groups.

        DeepSpeed does it once, after the first group has made its first step.
        """
        if not self._is_partitioned and self._zero.optimizer.state:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _set_state(self, parameter: Any, name: str, value: torch.Tensor) -> None:
        """Give DeepSpeed this rank's part of a state of a parameter's shape."""
        from deepspeed import utils

        if not self._is_partitioned:
            utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        # DeepSpeed's setter of a whole state fails if ranks have no equal parts of it.
        size, world = parameter.partition_numel(), self._run.world
        padded = nn.functional.pad(value.flatten(), (0, size * world.size - value.numel()))
        part = padded.narrow(0, size * world.rank, size)
        utils.safe_set_local_optimizer_state(parameter, part, name)

    def _numbers(self, state: dict[str, Any]) -> dict[nn.Parameter, int]:
        """Return the number of each parameter in an optimizer's ``state_dict()``."""
        pairs = zip(self._optimizer.param_groups, state["param_groups"], strict=True)
        return {
            parameter: number
            for group, saved in pairs
            for parameter, number in zip(group["params"], saved["params"], strict=True)
        }

    def _flats(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each trained parameter, and this rank's flat part that DeepSpeed steps for it."""
        zero = self._zero
        for number, (_, parameters) in enumerate(self._groups):
            for parameter in parameters:
                if self._is_partitioned:
                    part = zero.grad_position[zero.get_param_id(parameter)][0]
                    yield parameter, zero.fp32_partitioned_groups_flat[part]
                else:
                    yield parameter, zero.single_partition_of_fp32_groups[number]

    # --- the end ----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the module plain parameters: those of stage 3 on rank 0; on others these have a NaN.

        A next run gets them from rank 0.
        """
        plain: dict[nn.Parameter, nn.Parameter] = {}  # so that tied weights stay tied
        for parameter in self._module.parameters():
            with self._gathered(parameter):
                if self._keeps or not self._is_partitioned:
                    value = parameter.detach().clone()
                else:
                    value = absent_weights(_shape(parameter), parameter.dtype)
            plain[parameter] = nn.Parameter(value, parameter.requires_grad)
        self._engine.destroy()
        for module in self._module.modules():
            slots = module._parameters.items()
            module._parameters = {n: None if p is None else plain[p] for n, p in slots}

    def close(self) -> None:
        """Remove all hooks, also after an error."""
        self._engine.destroy()
        self._allow_pickles()


class _Root(nn.Module):
    """The model that the engine wraps: it calls the step methods, under the run's autocast."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.steps = run.loop.unwrapped
        self.autocasts = False
        self._device = run.device.type

    def forward(self, method: str, *args: Any) -> Any:
        if not self.autocasts or method != "training_step":
            return self.steps(method, *args)
        with torch.autocast(self._device, torch.get_autocast_dtype(self._device)):
            return self.steps(method, *args)


def _halves(_: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.flatten().chunk(2)


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of a whole parameter."""
    return cast("torch.Size", getattr(parameter, "ds_shape", parameter.shape))


def _is_elementwise(name: str, value: Any, parameter: nn.Parameter) -> bool:
    """True for a state of a parameter's shape; a count of steps may have that of a scalar."""
    return isinstance(value, torch.Tensor) and value.shape == _shape(parameter) and name != "step"
