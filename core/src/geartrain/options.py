"""The options of the loop, checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import Any

from geartrain.errors import UsageError, nearest
from geartrain.errors.distributions import import_from
from geartrain.errors.hints import hint

#: ``max_epochs`` if neither it nor ``max_steps`` is given.
_MAX_EPOCHS = 1000

#: Whole numbers, and the least value of each.
_LEAST = {
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "accumulate_grad_batches": 1,
    "log_every_n_steps": 1,
    "fast_dev_run": 0,
    "seed": 0,
}
_MAY_BE_NONE = ("min_epochs", "min_steps", "check_val_every_n_epoch", "seed")
_LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))
_CHOICES: Mapping[str, tuple[bool | str, ...]] = {
    "gradient_clip_algorithm": ("norm", "value"),
    "deterministic": (True, False, "warn"),
    **dict.fromkeys(("inference_mode", "detect_anomaly", "sync_batchnorm"), (True, False)),
}


@cache  # a step asks it
def takes_shortcuts() -> bool:
    """False if ``GEARTRAIN_PLAIN=1``: nothing is left out of what torch does. No bit changes."""
    return os.environ.get("GEARTRAIN_PLAIN", "") in ("", "0")


@dataclass(frozen=True, slots=True)
class Options:
    """The loop's options, as :class:`geartrain.Trainer` documents them."""

    max_epochs: int = _MAX_EPOCHS
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    reload_dataloaders_every_n_epochs: int = 0
    val_check_interval: int | float | timedelta = 1.0
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
    inference_mode: bool = False
    detect_anomaly: bool = False
    sync_batchnorm: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options among a Trainer's arguments; ``fast_dev_run`` sets every limit.

        Raises:
            UsageError: a wrong value.
        """
        options = {f.name: arguments.get(f.name, f.default) for f in fields(cls)}
        batches = options["fast_dev_run"]
        if not isinstance(batches, int):
            raise UsageError(
                f"fast_dev_run={batches!r} must be True, False or a number of batches."
            )
        options["fast_dev_run"] = int(batches)
        limits = {name: options[name] for name in ("limit_train_batches", "limit_val_batches")}
        given = [name for name, limit in limits.items() if limit is not None]
        if options["overfit_batches"] and given:
            message = f"overfit_batches limits the same batches as {' and '.join(given)}"
            raise UsageError(f"{message}. Fix: give one of them")
        options["val_check_interval"] = _interval(options["val_check_interval"])
        if batches:
            options |= dict.fromkeys(("max_steps", *_LIMITS), int(batches))
            options |= {
                "max_epochs": 1,
                "min_epochs": None,
                "min_steps": None,
                "overfit_batches": 0.0,
                "val_check_interval": 1.0,
                "check_val_every_n_epoch": 1,
                "num_sanity_val_steps": 0,
            }
        elif options["max_epochs"] is None:
            options["max_epochs"] = _MAX_EPOCHS if options["max_steps"] == -1 else -1
        return cls(**options)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_number and not (value is None and name in _MAY_BE_NONE):
                raise UsageError(f"{name}={value!r} must be a whole number, at least {least}.")
        for name in (*_LIMITS, "overfit_batches"):
            _check_limit(name, getattr(self, name), least=0)
        if not isinstance(self.val_check_interval, timedelta):
            _check_limit("val_check_interval", self.val_check_interval, least=1)
        for unit in ("epochs", "steps"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least is not None and -1 != most < least:
                message = f"min_{unit}={least} is more than max_{unit}={most}"
                raise UsageError(f"{message}. Fix: use a larger max_{unit}")
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise UsageError(
                "check_val_every_n_epoch=None counts batches across epochs. "
                "Fix: set val_check_interval to a whole number of batches"
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value == choice and type(value) is type(choice) for choice in choices):
                message = f"{name}={value!r} is none of its values"
                raise UsageError(f"{message}. Fix: use {' or '.join(map(repr, choices))}")
        clip = self.gradient_clip_val
        is_number = isinstance(clip, int | float) and not isinstance(clip, bool)
        if clip is not None and not (is_number and clip > 0):
            raise UsageError(
                f"gradient_clip_val={clip!r} must be a number above 0; None turns clipping off."
            )
        if self.seed is not None and self.seed >= 2**32:
            raise UsageError(f"seed={self.seed!r} must be below 2**32, which is NumPy's range.")

    def limit(self, stage: str) -> int | float | None:
        """The limit on batches in a stage: a number, a fraction of the loader, or ``None``."""
        if stage == "sanity_check":
            steps = self.num_sanity_val_steps
            return None if steps == -1 else steps
        limit: int | float | None
        limit = getattr(self, f"limit_{'val' if stage == 'validate' else stage}_batches")
        if limit is None and stage in ("train", "validate"):
            limit = self.overfit_batches or None
        return limit


def _interval(given: Any) -> Any:
    """Return ``val_check_interval`` with a time as a ``timedelta``, and a number in text read.

    Raises:
        UsageError: text that is neither.
    """
    name = "val_check_interval"
    if isinstance(given, timedelta | Mapping) or (isinstance(given, str) and ":" in given):
        durations = import_from("geartrain_callbacks.durations", f"a time as {name}")
        return timedelta(seconds=durations.seconds(name, given))
    try:
        if isinstance(given, str):
            return int(given) if given.strip().isdecimal() else float(given)
    except ValueError:
        message = f"{name}={given!r} is neither a number nor a time"
        raise UsageError(f"{message}. Fix: use a number, or 'DD:HH:MM:SS'") from None
    return given


def _check_limit(name: str, value: Any, least: int) -> None:
    if value is None and least == 0:
        return
    is_number = not isinstance(value, bool) and isinstance(value, int) and value >= least
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0 and (value > 0 or not least)
    if not (is_number or is_fraction):
        raise UsageError(
            f"{name}={value!r} must be a number of batches (at least {least}) or a fraction "
            f"{'above' if least else 'from'} 0.0 to 1.0."
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
