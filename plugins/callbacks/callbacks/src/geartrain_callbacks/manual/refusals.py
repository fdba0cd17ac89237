"""The errors of a module's methods of manual optimisation where nothing can answer them."""

from __future__ import annotations

from geartrain import Module, TrainingError


def refusal(module: Module, method: str) -> TrainingError:
    """Return the error of a method that is called in automatic optimisation, or outside of fit."""
    name = type(module).__name__
    if module.automatic_optimization and method == "clip_gradients":
        return TrainingError(
            f"{name} calls self.clip_gradients outside configure_gradient_clipping, and its "
            "automatic_optimization is True. Fix: call it in configure_gradient_clipping"
        )
    if module.automatic_optimization:
        return TrainingError(
            f"{name} calls self.{method}, and its automatic_optimization is True: the loop "
            "does backward and steps itself. Fix: automatic_optimization = False in __init__, "
            "or return the loss from training_step"
        )
    message = "which works only in fit, from on_fit_start on"
    return TrainingError(f"{name} calls self.{method}, {message}")
