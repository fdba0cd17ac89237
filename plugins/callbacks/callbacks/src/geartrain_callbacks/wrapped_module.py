"""Train any ``nn.Module`` without a subclass: ``trainer.fit(model, loader, loss=, optimizer=)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, TrainingError, UsageError
from geartrain.plugin_api import parameters_of


class WrappedModule(Module):
    """A plain model with a loss and an optimizer; its checkpoints have the model's names.

    Args:
        model: called with a batch: ``(*inputs, target)`` as ``model(*inputs)``, a mapping as
            ``model(**batch)``, anything else as ``model(batch)``.
        loss: ``loss(output, target)``; the target of a batch without one is the batch itself.
            ``None`` if the model's output has ``output.loss`` or ``output["loss"]``, as in
            transformers.
        optimizer: an optimizer, or a class or ``functools.partial`` that makes one from the
            parameters.
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
        given = self._optimizer
        return given if isinstance(given, Optimizer) else given(self.model.parameters())

    # The ignored error: nn.Module's method has overloads.
    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._uncompiled.state_dict(*arguments, **named)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self._uncompiled.load_state_dict(state_dict, strict=strict, assign=assign)

    @property
    def _uncompiled(self) -> nn.Module:
        """The model, or the one that the user gave to ``torch.compile``: its names are the same."""
        inner: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return inner

    def _loss_of(self, batch: Any) -> torch.Tensor:
        output = self(batch)
        if self._loss is not None:
            return self._loss(output, _parts(batch)[1])
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            message = (
                f"{type(self.model).__name__} gave {type(output).__name__} without a loss in it"
            )
            raise TrainingError(f"{message}. Fix: loss=FUNCTION")
        return loss


def _parts(batch: Any) -> tuple[Iterable[Any] | Mapping[str, Any], Any]:
    """Return the model's inputs, and the target for the loss."""
    if isinstance(batch, Mapping):
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], batch[-1]
    only = batch[0] if isinstance(batch, tuple | list) else batch
    return (only,), only


def as_module(command: str, model: Any, loss: Any, optimizer: Any) -> Any:
    """Return a plain ``nn.Module`` as a :class:`WrappedModule`.

    Of ``torch.compile(module)`` return the Module, which the plugin ``compile`` then compiles.

    Raises:
        UsageError: an argument is missing, not needed, or of the wrong kind.
    """
    compiled = getattr(model, "_orig_mod", None)  # of the result of torch.compile
    if isinstance(compiled, Module):
        vars(compiled)["_compile_with"] = model.dynamo_ctx  # for the plugin compile
        model = compiled
    if isinstance(model, WrappedModule) and loss is not None:
        model = model.model  # of the trainer's last run
    if isinstance(model, Module) or not isinstance(model, nn.Module):
        if loss is not None or optimizer is not None:
            message = f"{type(model).__name__} has its own"
            raise UsageError(f"loss= and optimizer= belong to a plain nn.Module; {message}")
        return model
    name = type(model).__name__
    if loss is not None and not callable(loss):
        hint = "loss(output, target), such as torch.nn.functional.cross_entropy"
        raise UsageError(f"loss={loss!r} is no function. Fix: {hint}")
    if isinstance(loss, type):
        raise UsageError(f"loss={loss.__name__} is a class. Fix: loss={loss.__name__}()")
    if command == "fit" and not (callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise UsageError(
            f"{name} is a plain nn.Module, and optimizer={optimizer!r} is neither an optimizer nor "
            "makes one. Fix: optimizer=torch.optim.AdamW, a functools.partial of it, or subclass "
            "geartrain.Module"
        )
    if isinstance(optimizer, Optimizer):
        known = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in known for parameter in parameters_of([optimizer])):
            message = f"the optimizer steps parameters that {name} does not have"
            raise UsageError(f"{message}. Fix: make it from model.parameters()")
    return WrappedModule(model, loss, optimizer)
