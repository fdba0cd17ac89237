"""Any ``torch.nn.Module``, trained without subclassing: ``Trainer.fit(model, loader, loss=..., optimizer=...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain.errors import TrainingError, UsageError
from geartrain.module.module import Module


class WrappedModule(Module):
    """A plain model with a loss and an optimizer; its checkpoints have the model's names.

    Args:
        model: called with a batch: ``(*inputs, target)`` as ``model(*inputs)``, a mapping as ``model(**batch)``, anything else as it is.
        loss: ``loss(output, target)``; if a batch has no target, it is the batch itself. ``None``: the model's
            output has the loss as ``output.loss`` or ``output["loss"]``, as those of transformers have.
        optimizer: makes one from the parameters (a class with its defaults, or a ``functools.partial``), or is one.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None, optimizer: Any
    ) -> None:
        super().__init__()
        self.model, self._loss, self._optimizer = model, loss, optimizer

    def forward(self, batch: Any) -> Any:
        inputs, _ = _parts(batch)
        return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(*inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss_of(batch)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._loss_of(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self._loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Optimizer:
        return (
            self._optimizer
            if isinstance(self._optimizer, Optimizer)
            else self._optimizer(self.model.parameters())
        )

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # nn.Module's has overloads
        return self.model.state_dict(*arguments, **options)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        output = self(batch)
        if self._loss is not None:
            return self._loss(output, _parts(batch)[1])
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise TrainingError(
                f"{type(self.model).__name__} gave {type(output).__name__} without a loss in it. Fix: loss=FUNCTION"
            )
        return loss


def _parts(batch: Any) -> tuple[Iterable[Any] | Mapping[str, Any], Any]:
    """Return the model's input, and the target that the loss compares the output with."""
    if isinstance(batch, Mapping):
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], batch[-1]
    only = batch[0] if isinstance(batch, tuple | list) else batch
    return (only,), only


def as_module(command: str, model: Any, loss: Any, optimizer: Any) -> Any:
    """Return a geartrain Module as it is; a plain ``nn.Module`` with its loss and optimizer as :class:`WrappedModule`.

    Raises:
        UsageError: something is missing, given without need, or of the wrong kind.
    """
    if isinstance(model, type):
        raise UsageError(f"{model.__name__} is a class. Fix: {command}({model.__name__}(...), ...)")
    if isinstance(model, WrappedModule) and loss is not None:
        model = model.model  # of the trainer's last run
    if isinstance(model, Module) or not isinstance(model, nn.Module):
        if loss is not None or optimizer is not None:
            raise UsageError(
                f"loss= and optimizer= belong to a plain nn.Module; {type(model).__name__} has its own"
            )
        return model
    name = type(model).__name__
    if loss is not None and not callable(loss):
        raise UsageError(
            f"loss={loss!r} is no function. Fix: loss(output, target), such as torch.nn.functional.cross_entropy"
        )
    if isinstance(loss, type):
        raise UsageError(f"loss={loss.__name__} is a class. Fix: loss={loss.__name__}()")
    if command == "fit" and not (callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise UsageError(
            f"{name} is a plain nn.Module, and optimizer={optimizer!r} is neither an optimizer nor makes one. "
            "Fix: optimizer=torch.optim.AdamW, a functools.partial of it, or subclass geartrain.Module"
        )
    if isinstance(optimizer, Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if any(
            id(parameter) not in own
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise UsageError(
                f"the optimizer steps parameters that {name} does not have. Fix: make it from model.parameters()"
            )
    return WrappedModule(model, loss, optimizer)
