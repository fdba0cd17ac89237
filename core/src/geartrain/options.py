"""The options of the loop, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from geartrain.errors import UsageError, nearest
from geartrain.errors.hints import hint

#: ``max_epochs`` if neither it nor ``max_steps`` is given.
_MAX_EPOCHS = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """The loop's options, as :class:`geartrain.Trainer` documents them."""

    max_epochs: int = _MAX_EPOCHS
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    log_every_n_steps: int = 50
    enable_progress_bar: bool = True
    use_distributed_sampler: bool = True
    fast_dev_run: int = 0
    seed: int | None = None
    deterministic: bool | str = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options among a Trainer's arguments. ``fast_dev_run`` sets every limit.

        Raises:
            UsageError: a wrong value.
        """
        options = {field.name: arguments[field.name] for field in fields(cls)}
        batches = options["fast_dev_run"]
        if not isinstance(batches, int) or batches < 0:
            raise UsageError(
                f"fast_dev_run={batches!r} must be True, False or a number of batches."
            )
        options["fast_dev_run"] = int(batches)
        if batches:
            amounts = (
                "max_steps",
                "limit_train_batches",
                "limit_val_batches",
                "limit_test_batches",
                "limit_predict_batches",
            )
            options |= dict.fromkeys(amounts, int(batches))
            options |= {
                "max_epochs": 1,
                "val_check_interval": 1.0,
                "check_val_every_n_epoch": 1,
                "num_sanity_val_steps": 0,
            }
        elif options["max_epochs"] is None:
            options["max_epochs"] = _MAX_EPOCHS if options["max_steps"] == -1 else -1
        return cls(**options)

    def __post_init__(self) -> None:
        for name in (
            "limit_train_batches",
            "limit_val_batches",
            "limit_test_batches",
            "limit_predict_batches",
        ):
            _check_limit(name, getattr(self, name))
        _check_limit("val_check_interval", self.val_check_interval, least=1)
        if not self.val_check_interval:
            raise UsageError(
                f"val_check_interval={self.val_check_interval!r} never validates. "
                "Fix: use a fraction of an epoch above 0.0, or a number of batches"
            )
        _check_least("max_epochs", self.max_epochs, -1)
        _check_least("max_steps", self.max_steps, -1)
        _check_least("num_sanity_val_steps", self.num_sanity_val_steps, -1)
        _check_least("accumulate_grad_batches", self.accumulate_grad_batches, 1)
        _check_least("log_every_n_steps", self.log_every_n_steps, 1)
        _check_least("fast_dev_run", self.fast_dev_run, 0)
        if self.check_val_every_n_epoch is not None:
            _check_least("check_val_every_n_epoch", self.check_val_every_n_epoch, 1)
        elif isinstance(self.val_check_interval, float):
            raise UsageError(
                "check_val_every_n_epoch=None counts batches across epochs. "
                "Fix: set val_check_interval to a whole number of batches"
            )
        if self.gradient_clip_algorithm not in ("norm", "value"):
            raise UsageError(
                f"gradient_clip_algorithm={self.gradient_clip_algorithm!r} is unknown. "
                "Fix: use 'norm' or 'value'"
            )
        clip = self.gradient_clip_val
        if clip is not None and (
            isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0
        ):
            raise UsageError(
                f"gradient_clip_val={clip!r} must be a number above 0; None turns clipping off."
            )
        if self.seed is not None:
            _check_least("seed", self.seed, 0)
            if self.seed >= 2**32:
                raise UsageError(f"seed={self.seed!r} must be below 2**32, which is NumPy's range.")
        if self.deterministic not in (True, False, "warn"):
            raise UsageError(f"deterministic={self.deterministic!r}: it is True, False or 'warn'.")

    def limit(self, stage: str) -> int | float | None:
        """The limit on batches in a stage: a number, a fraction of the loader, or ``None``."""
        if stage == "sanity_check":
            steps = self.num_sanity_val_steps
            return None if steps == -1 else steps
        limits = {
            "train": self.limit_train_batches,
            "validate": self.limit_val_batches,
            "test": self.limit_test_batches,
            "predict": self.limit_predict_batches,
        }
        return limits[stage]


def _check_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r} must be a whole number, at least {least}.")


def _check_limit(name: str, value: Any, least: int = 0) -> None:
    if value is None:
        return
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise UsageError(
            f"{name}={value!r}: a fraction is between 0.0 and 1.0. "
            "Fix: use such a fraction, or a whole number of batches"
        )
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value < 0
        or (isinstance(value, int) and value < least)
    ):
        raise UsageError(
            f"{name}={value!r} must be a number of batches (at least {least}) "
            "or a fraction between 0.0 and 1.0."
        )


def refuse_unknown(of: str, unknown: Iterable[str], function: Callable[..., Any]) -> None:
    """Answer each argument that does not exist with the one to use.

    Args:
        of: ``"Trainer"`` or ``"Trainer.fit"``.
        function: has the arguments that exist; the last one collects ``unknown``.

    Raises:
        UsageError: there is one.
    """
    known = list(inspect.signature(function).parameters)[:-1] if unknown else []
    answers = []
    for name in unknown:
        instead = hint(f"{of}()", name)
        answer = f"Write: {instead}" if instead else nearest(name, known)
        answers.append(f"{of} has no argument {name!r}. {answer}")
    if answers:
        raise UsageError("\n".join(answers))
