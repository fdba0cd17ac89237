"""DeepSpeed's configuration: that of the user's file, and what the Trainer decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import nearest, user_path

#: Key -> the Trainer's option, or the method, that decides it.
_OURS = {
    "train_batch_size": "the batch_size of the DataLoader",
    "train_micro_batch_size_per_gpu": "the batch_size of the DataLoader",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "managed_gradient_accumulation": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "optimizer": "configure_optimizers",
    "scheduler": "configure_optimizers",
    "fp16": "Trainer(precision=...)",
    "bf16": "Trainer(precision=...)",
    "amp": "Trainer(precision=...)",
    "torch_autocast": "Trainer(precision=...)",
    "data_types": "Trainer(precision=...)",
}
#: Keys that change how DeepSpeed computes, sends or reports, and not what is trained.
_THEIRS = (
    *("zero_optimization", "communication_data_type", "gradient_predivide_factor"),
    *("prescale_gradients", "comms_logger", "flops_profiler", "wall_clock_breakdown"),
    *("memory_breakdown", "steps_per_print", "dump_state", "zero_allow_untested_optimizer"),
)


def read(path: str, stage: int, label: str) -> dict[str, Any]:
    """Read a configuration, and refuse what the Trainer or another option decides.

    Raises:
        UsageError: no such file, no JSON object, or a key that is not the file's.
    """
    file = user_path(path, f"{label}: config", reads=True)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{label}: config={path!r} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization", {}), dict):
        raise UsageError(f"{label}: config={path!r} is not an object with DeepSpeed's keys")
    for key in config:
        if key in _OURS:
            message = f"{label}: config={path!r} has {key!r}, which {_OURS[key]} decides"
            raise UsageError(f"{message}. Fix: take it out of the file")
        if key not in _THEIRS:
            message = f"{label}: config={path!r} has {key!r}, which this strategy does not support"
            raise UsageError(f"{message}. {nearest(key, _THEIRS)}")
    zero = config.get("zero_optimization", {})
    if zero.get("stage", stage) != stage:
        message = f"{label}: config={path!r} has stage {zero['stage']!r}, and stage={stage}"
        raise UsageError(f"{message}. Fix: --strategy.stage {zero['stage']}")
    for key in ("offload_optimizer", "offload_param", "zenflow"):
        if key in zero:
            message = f"{label}: config={path!r} has {key!r}, which this strategy does not support"
            raise UsageError(f"{message}. Fix: --strategy fsdp --strategy.offload true")
    return config


def complete(config: Mapping[str, Any], stage: int, clip: float | None) -> dict[str, Any]:
    """Return the configuration of an engine.

    Gradients are accumulated as the strategy says, and the loss is divided by then.
    """
    return {
        **config,
        "zero_optimization": {**config.get("zero_optimization", {}), "stage": stage},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
