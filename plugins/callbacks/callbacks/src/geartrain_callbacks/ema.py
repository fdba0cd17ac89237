"""``ema``: an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import overridden
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.fresh_start import FreshStart
from geartrain_callbacks.saving import drop_fit
from geartrain_callbacks.shards import local, part_of, whole_of
from geartrain_callbacks.stopping import say


class EMA(FreshStart, PluginCallback):
    """Keep an exponential moving average of the weights, on their device.

    ``average = decay · average + (1 - decay) · weights``. The CPU never waits for it. Parameters
    and floating-point buffers (such as BatchNorm's statistics) are averaged; other buffers are the
    module's. 16-bit weights are averaged in float32, because 16 bits would round small changes
    away. Every rank keeps the same average, because every rank has the same weights; buffers are
    rank 0's. If a strategy gives ranks different weights, each rank averages its own.

    The module holds the average during validation inside ``fit``, and from the end of ``fit``:
    you test, predict with and save the average. During training it holds the trained weights; a
    ``fit`` that fails leaves those in the module.

    In a checkpoint, ``model`` is the validated version: the average, with the trained weights
    beside it as ``trained``. With ``validate=False`` it holds the trained weights, with the
    average beside them as ``average``. Before the first update the checkpoint has only ``model``.
    ``on_save_checkpoint`` of the module is called for each version. If ``on_load_checkpoint``
    renames a weight, its average is renamed, too; the average of a weight that it changes starts
    again from the new one.

    Args:
        decay: the share of the average that an update keeps, between 0 and 1.
        every: steps between two updates; ``decay`` is not adjusted to it.
        start_step: the step from which to average; before it the average equals the weights.
        validate: validate the average during ``fit`` and save it as ``model``; ``False``: the
            trained weights.

    Raises:
        UsageError: ``decay``, ``every`` or ``start_step`` is out of range; or a loaded state does
            not fit the module.
    """

    #: A checkpoint holds rank 0's state.
    same_on_all_ranks = True
    #: The plugin's name, for messages.
    _name = "ema"
    #: Whether floating-point buffers are averaged, and where; ``None``: on the weights' device.
    _use_buffers: bool = True
    _device: torch.device | None = None

    def __init__(
        self, decay: float = 0.999, every: int = 1, start_step: int = 0, validate: bool = True
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
            raise UsageError(f"ema: decay={decay!r} must lie between 0.0 and 1.0.")
        for name, value, least in (("every", every, 1), ("start_step", start_step, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(
                    f"ema: {name}={value!r} must be a whole number of steps, at least {least}."
                )
        self.decay = float(decay)
        self.every = every
        self.start_step = start_step
        self.validate = validate
        self.forget()
        self._names: list[str] = []
        #: The module's tensors, and of each this rank's part: all of it, unless ranks have shards.
        self._tensors: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._average: list[torch.Tensor] = []
        self._trained: list[torch.Tensor] | None = None
        #: True after a fit that left the average in the module: the trained weights are gone.
        self._replaced = False

    def forget(self) -> None:
        #: Updates done, and the last step that was looked at.
        self.updates = self._seen = 0
        self._loaded: dict[str, torch.Tensor] | None = None
        #: The weights in the file from which a fit resumes, with their ``_version``.
        self._saved: dict[str, tuple[torch.Tensor, int]] = {}
        #: Names of the module's weights -> in the file; ``None``: ``on_load_checkpoint`` made it.
        self._sources: dict[str, str | None] = {}

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.command != "fit":
            return
        self._replaced, self._seen = False, run.step
        tensors: list[tuple[str, torch.Tensor]] = [*run.module.named_parameters()]
        tensors += run.module.named_buffers() if self._use_buffers else ()
        kept = {_plain(name): t.detach() for name, t in tensors if t.is_floating_point()}
        self._names, self._tensors, self._trained = list(kept), list(kept.values()), None
        self._weights = list(map(local, self._tensors))
        self._average = [
            t.to(
                self._device or t.device, torch.float32 if t.element_size() < 4 else None, copy=True
            )
            for t in self._weights
        ]
        if self._loaded is not None:
            self._restore(self._loaded)
        self._loaded, self._saved, self._sources = None, {}, {}

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run: Run) -> Generator[None, Any, Any]:
        state = yield
        if run.loop.start is not None and run.loop.start.resumes and isinstance(state, dict):
            weights = state.get("trained", state.get("model"))
            items = weights.items() if isinstance(weights, dict) else ()
            kept = ((_plain(n), t) for n, t in items if isinstance(t, torch.Tensor))
            self._saved = {name: (t, t._version) for name, t in kept}
        return state

    @hookimpl(wrapper=True)
    def load_model_state(self, state: dict[str, Any]) -> Generator[None, Any, Any]:
        if self._saved:
            same = {id(t): n for n, (t, version) in self._saved.items() if t._version == version}
            self._sources = {_plain(name): same.get(id(t)) for name, t in state.items()}
        return (yield)

    @hookimpl(specname="on_train_batch_end")
    def _on_train_batch_end(self, run: Run) -> None:
        if run.loop.stepped > run.batch_idx:  # before the module's method, which may save
            self._step_done(run, run.step + 1)

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        self._step_done(run, run.step)  # in a Session, which has no batches

    def _step_done(self, run: Run, step: int) -> None:
        """Average after each step once."""
        if step != self._seen:
            self._seen = step
            self._after_step(step)

    @torch.no_grad()
    def _after_step(self, step: int) -> None:
        if step >= self.start_step and step % self.every == 0:
            current = [
                w if w.dtype == a.dtype else w.to(a.dtype)
                for w, a in zip(self._weights, self._average, strict=True)
            ]
            if self.updates or self.start_step == 0:
                torch._foreach_lerp_(self._average, current, 1.0 - self.decay)
            else:
                torch._foreach_copy_(self._average, current)
            self.updates += 1

    @hookimpl(specname="on_validation_start")
    def _on_validation_start(self, run: Run) -> None:
        if self.validate and run.command == "fit" and run.stage == "validate" and self.updates:
            self._trained = [weight.clone() for weight in self._weights]
            self._into_module(run)

    @hookimpl(specname="on_validation_end")
    def _on_validation_end(self) -> None:
        self._back()

    @hookimpl(wrapper=True)
    def save_checkpoint(
        self, run: Run, state: dict[str, Any], path: Path
    ) -> Generator[None, Any, Any]:
        if self._replaced:
            drop_fit(state, path, f"{self._name} has replaced the trained weights by the average")
        elif run.command == "fit" and self.updates and isinstance(state.get("model"), dict):
            trained, average = self._states(run, state)
            state["model"] = average if self.validate else trained
            if "fit" in state:
                beside = ("trained", trained) if self.validate else ("average", average)
                state[beside[0]] = beside[1]
        return (yield)

    @hookimpl(specname="on_exception")
    def _on_exception(self) -> None:
        self._back()

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if run.command == "fit" and self.updates:
            self._into_module(run)
            self._replaced = True
            say(run, f"{self._name}: the module now holds the average of {self.updates} updates.")

    def state_dict(self) -> dict[str, Any]:
        average = self._loaded
        if average is None:
            wholes = map(whole_of, self._average, self._tensors)
            average = dict(zip(self._names, wholes, strict=True))
        return {
            "updates": self.updates,
            "average": {name: tensor.clone() for name, tensor in average.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the average from this state."""
        average = {_plain(name): tensor for name, tensor in state["average"].items()}
        if self._sources:
            renamed = {n: average[old] for n, old in self._sources.items() if old in average}
            average = {n: t for n, t in average.items() if n not in self._saved} | renamed
        self.updates, self._loaded = state["updates"], average or None

    @torch.no_grad()
    def _into_module(self, run: Run) -> None:
        torch._foreach_copy_(self._weights, self._average)
        run.coordinator.broadcast_buffers(run)

    @torch.no_grad()
    def _states(self, run: Run, checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the ``model`` of a checkpoint twice: with the trained weights, and the average.

        The module itself builds both, so that names and tied weights are right.
        """
        current, states = [weight.clone() for weight in self._weights], []
        try:
            for weights in (current if self._trained is None else self._trained, self._average):
                torch._foreach_copy_(self._weights, weights)
                state = {**checkpoint, "model": run.hooks.model_state(run=run)}
                if overridden(run.module, "on_save_checkpoint"):
                    run.module.on_save_checkpoint(state)
                items = state["model"].items()
                states.append({n: t.clone() if torch.is_tensor(t) else t for n, t in items})
        finally:
            torch._foreach_copy_(self._weights, current)
        return states

    @torch.no_grad()
    def _back(self) -> None:
        if self._trained is not None:
            torch._foreach_copy_(self._weights, self._trained)
            self._trained = None

    @torch.no_grad()
    def _restore(self, state: dict[str, torch.Tensor]) -> None:
        tensors = dict(zip(self._names, self._tensors, strict=True))
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        changed = {name for name, source in self._sources.items() if source is None}
        differences = sorted((set(shapes) ^ set(state)) - changed) or [
            n for n in state if shapes[n] != list(state[n].shape)
        ]
        if differences:
            raise UsageError(
                f"geartrain-callbacks[{self._name}]: its state is of another module: "
                f"{differences[0]} differs. Fix: pass the module that it averaged"
            )
        for name, average in zip(self._names, self._average, strict=True):
            if name in state:
                average.copy_(part_of(state[name], tensors[name]))


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile of a part puts it into names
