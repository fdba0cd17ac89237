"""Record which units a rank ran, and which parameters got gradients."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from geartrain import Run, TrainingError
from geartrain.plugin_api import map_tensors
from geartrain_sharded.tensors import part_of


class Usage:
    """What this rank has used since the last step.

    A rank gathers a unit's parameters when the unit runs. A gather takes the next shards that the
    other ranks send, even those of another unit. If two ranks run different units of equal size,
    each computes with weights that are partly those of the other unit, and nothing fails.

    Args:
        run: of this rank.
        model: sharded.
        units: its sharded parts, inner ones first.
    """

    def __init__(self, run: Run, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self._label = run.plan.strategy.label
        #: The sharded parameters.
        self._parameters = {
            name.removeprefix("module."): each
            for name, each in model.named_parameters()
            if isinstance(each, DTensor)
        }
        self._order = array("L")
        self._used: set[str] = set()
        #: Name -> the whole parameter, which is the same object in each forward.
        self._wholes: dict[str, torch.Tensor] = {}
        #: torch's count of the changes of each; a gather is no change.
        self._versions: list[int] = []
        #: The names of those that were trained.
        self._trained: set[str] = set()
        names = {id(each): name for name, each in self._parameters.items()}
        self._handles = []
        for number, unit in enumerate([*units, model]):
            slots = [
                (part, slot, names.pop(id(each)))
                for part in unit.modules()
                for slot, each in part._parameters.items()
                if id(each) in names
            ]
            hook = partial(self._runs, number, slots)
            self._handles.append(unit.register_forward_pre_hook(hook))
        self._handles += [unit.register_forward_hook(self._ran) for unit in units]

    def _runs(
        self, number: int, slots: list[tuple[nn.Module, str, str]], _unit: nn.Module, _inputs: Any
    ) -> None:
        """Note a unit whose parameters are whole now, because it begins its forward."""
        self._order.append(number)
        for part, slot, name in slots:
            whole: Any = part._parameters[slot]
            if name not in self._wholes and not whole.is_inference():
                self._wholes[name] = whole
                self._versions.append(whole._version)
            if whole.requires_grad and name not in self._trained:
                self._trained.add(name)
                whole.register_post_accumulate_grad_hook(partial(self._uses, name))

    def _ran(self, _unit: nn.Module, _inputs: Any, output: Any) -> None:
        map_tensors(output, self._check_backward)

    def _check_backward(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._refuse_graph)  # type: ignore[no-untyped-call]
        return tensor

    def _refuse_graph(self, _gradient: torch.Tensor) -> None:
        """Refuse a backward that is to be differentiated: ``fully_shard`` has no backward of it.

        Raises:
            TrainingError: gradients are computed with ``create_graph=True``.
        """
        if torch.is_grad_enabled():
            raise TrainingError(
                f"{self._label}: create_graph=True: torch's fully_shard loses a part of the "
                "gradient of a gradient. Fix: --strategy ddp"
            )

    def _uses(self, name: str, _parameter: torch.Tensor) -> None:
        self._used.add(name)

    def has_wholes(self, module: nn.Module) -> bool:
        """Return whether the module has whole copies now, instead of this rank's parts."""
        return not {*map(id, self._wholes.values())}.isdisjoint(map(id, module.parameters()))

    @torch.no_grad()
    def keep_changes(self) -> None:
        """Change the parts as the user has changed whole copies, before these are dropped.

        Raises:
            TrainingError: a changed copy was dropped before, or has another dtype.
        """
        versions = [whole._version for whole in self._wholes.values()]
        if versions == self._versions:
            return
        before, self._versions = self._versions, versions
        for (name, whole), old, new in zip(self._wholes.items(), before, versions, strict=True):
            if old == new:
                continue
            parameter = self._parameters[name]
            if whole.dtype != parameter.dtype or not whole.untyped_storage().size():
                raise TrainingError(
                    f"{self._label}: {name} was changed in a forward, where ranks have whole "
                    "copies, and the change is lost. "
                    "Fix: change it in on_train_batch_start or on_train_batch_end"
                )
            parameter.copy_(part_of(parameter, whole.detach()))

    def check(self, run: Run, finds_unused: bool) -> None:
        """Compare with the other ranks, and begin again; a collective.

        Args:
            run: of this rank.
            finds_unused: delete gradients of parameters that no rank has used, instead of raising.

        Raises:
            TrainingError: ranks have run different units, not all parameters were used, or a
                forward has frozen one.
        """
        label, rank = run.plan.strategy.label, run.world.rank
        for name, whole in self._wholes.items():
            if name not in self._trained:
                continue
            if whole.requires_grad != self._parameters[name].requires_grad:
                raise TrainingError(
                    f"{label}: requires_grad of {name} was changed in a forward, where ranks have "
                    "whole copies. Fix: change it in on_train_batch_start or on_train_epoch_start"
                )
        trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        unused = [name for name in trained if name not in self._used]
        if unused and not finds_unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise TrainingError(
                f"{label}: rank {rank} did not use these parameters in a step: "
                f"{', '.join(unused[:5])}{more}. Fix: --strategy.find_unused_parameters true"
            )
        values = [zlib.crc32(self._order)]
        if finds_unused:
            values += [name in self._used for name in trained]
        del self._order[:]
        self._used.clear()
        table = run.hooks.log_sync(run=run, values=torch.tensor(values, dtype=torch.float64))
        others = [r for r, value in enumerate(table[:, 0].tolist()) if value != values[0]]
        if others:
            raise TrainingError(
                f"{label}: rank {rank} and ranks {others} have run different parts of the module, "
                "or in another order, so they got each other's weights. "
                "Fix: run the same parts on each rank, in the same order"
            )
        if finds_unused:
            for each, is_used in zip(trained.values(), table[:, 1:].any(0).tolist(), strict=True):
                if not is_used:
                    each.grad = None

    def remove(self) -> None:
        """Remove the hooks of the units."""
        for handle in self._handles:
            handle.remove()
