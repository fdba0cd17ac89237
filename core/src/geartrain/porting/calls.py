"""``Trainer(...)``: its arguments under geartrain's names, and what none stands for."""

from __future__ import annotations

import inspect
from typing import Any

from geartrain.options import RENAMED
from geartrain.porting import names
from geartrain.porting.arguments import Arguments
from geartrain.trainer import Trainer

#: Something that is left to do: what, and what to write.
Todo = tuple[str, str]

_KNOWN = [name for name in inspect.signature(Trainer).parameters if name != "unknown"]
#: Values of accelerator= and distributed_backend= that were strategies.
_STRATEGIES = ("dp", "ddp", "ddp2", "ddp_spawn", "horovod", "bagua")
#: What strategies begin with that no distribution provides.
_NO_STRATEGY = ("fsdp", "deepspeed", "ddp_sharded", "ddp_fully_sharded", "xla", "tpu", "colossalai", "hpu", "ipu")
#: Arguments that ask for a plugin -> the plugin.
_PLUGINS = {
    "enable_model_summary": "model_summary",
    "weights_summary": "model_summary",
    "log_gpu_memory": "device_stats",
    "track_grad_norm": "norms",
    "terminate_on_nan": "nan_guard",
}
#: Values with which an argument asks for nothing, or for what geartrain does anyway.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "enable_checkpointing": (True, False, None),
    "checkpoint_callback": (True, False, None),
    "enable_model_summary": (False, None),
    "weights_summary": (None,),
    "track_grad_norm": (-1, None),
    "terminate_on_nan": (False, None),
    "log_gpu_memory": (None,),
    "stochastic_weight_avg": (False,),
    "logger": (False, None),
    "profiler": (None,),
    "detect_anomaly": (False,),
    "benchmark": (False, None),
    "sync_batchnorm": (False,),
    "barebones": (False,),
    "overfit_batches": (0, 0.0),
    "min_epochs": (None,),
    "min_steps": (None,),
    "reload_dataloaders_every_n_epochs": (0,),
    "inference_mode": (True, False),
    "auto_select_gpus": (False,),
    "auto_lr_find": (False,),
    "auto_scale_batch_size": (False, None),
    "prepare_data_per_node": (True,),
    "amp_backend": ("native",),
    "move_metrics_to_cpu": (True, False),
    "tpu_cores": (None,),
    "ipus": (None,),
    "num_processes": (None,),
    "resume_from_checkpoint": (None,),
    "default_root_dir": (None,),
    "weights_save_path": (None,),
    "plugins": (None,),
    "callbacks": (None,),
    "strategy": (None,),
    "accelerator": (None,),
    "enable_autolog_hparams": (True, False),
    "model_registry": (None,),
}


def trainer(arguments: Arguments) -> list[Todo]:
    """Port the arguments of ``Trainer(...)``; returns what is left."""
    todo: list[Todo] = []
    for name in list(arguments.names):
        if name in _NOTHING and arguments.literal(name) in _NOTHING[name]:
            arguments.drop(name)
    for step in (_devices, _strategy, _loggers, _checkpoints, _plugins, _others):
        todo += step(arguments)
    for name in arguments.names:
        if name in RENAMED:
            todo.append((f"Trainer({name}=...)", RENAMED[name]))
        elif name == "**":
            todo.append(("Trainer(**...)", "look at its names: geartrain refuses those that it does not have"))
        elif name in ("", "*"):
            todo.append(("Trainer's positional arguments", "name them: accelerator=..., devices=..."))
        elif name not in _KNOWN:
            todo.append((f"Trainer({name}=...)", "nothing: see docs/from-lightning.md"))
    return todo


def fabric(arguments: Arguments) -> list[Todo]:
    """Port the arguments of ``Fabric(...)``, whose loggers are plugins; returns what is left."""
    if "loggers" in arguments.names and arguments.literal("loggers") in (None, []):
        arguments.drop("loggers")
    return _loggers(arguments, "Fabric", "loggers")


def fit(arguments: Arguments) -> list[Todo]:
    """``trainer.fit(ckpt_path=...)``, which means the same, but for two places that Lightning knows and its ``"last"``."""
    given = arguments.literal("ckpt_path") if "ckpt_path" in arguments.names else None
    if given == "last":  # which Lightning passes over where there is none
        arguments.put("ckpt_path", '"auto"')
    elif given in ("hpc", "registry"):
        return [(f"Trainer.fit(ckpt_path={given!r})", "ckpt_path=FILE")]
    return []


def _devices(arguments: Arguments) -> list[Todo]:
    todo: list[Todo] = []
    for old in ("distributed_backend", "accelerator"):
        if arguments.literal(old) in (*_STRATEGIES, "ddp_cpu"):
            _as_strategy(arguments, old)
    for old in ("gpus", "num_gpus"):
        if old not in arguments.names:
            continue
        value = arguments.literal(old)
        if value in (0, None, "0", []) and value is not False:
            if "accelerator" in arguments.names:
                arguments.drop(old)
                arguments.put("accelerator", '"cpu"')
            else:
                arguments.rename(old, "accelerator", '"cpu"')
            continue
        arguments.rename(old, "devices")
        if "accelerator" not in arguments.names:
            arguments.put("accelerator", '"gpu"', after="devices")
        if value is ...:
            todo.append((f"Trainer({old}={arguments.source('devices')})", "accelerator='cpu' and no devices, where it is 0 or None"))
    if "num_processes" in arguments.names and "devices" not in arguments.names:
        arguments.rename("num_processes", "devices")
        if "accelerator" not in arguments.names:
            arguments.put("accelerator", '"cpu"', after="devices")
    if arguments.literal("auto_select_gpus") is True:
        arguments.rename("auto_select_gpus", "accelerator_options", "{'auto_select': True}".replace("'", '"'))
        if arguments.literal("accelerator") == "gpu":
            arguments.put("accelerator", '"cuda"')
    return todo


def _as_strategy(arguments: Arguments, old: str) -> None:
    """``accelerator="ddp"`` is a strategy."""
    name = str(arguments.literal(old))
    if "strategy" in arguments.names:
        arguments.drop(old)
    else:
        arguments.rename(old, "strategy", '"ddp_spawn"' if name == "ddp_cpu" else None)
    if name == "ddp_cpu":
        arguments.put("accelerator", '"cpu"', after="strategy")


def _strategy(arguments: Arguments) -> list[Todo]:
    name = arguments.literal("strategy")
    if isinstance(name, str) and name in names.SPELT:
        new, options = names.SPELT[name]
        arguments.put("strategy", f'"{new}"')
        if options:
            arguments.put("strategy_options", options.replace("'", '"'), after="strategy")
    elif isinstance(name, str) and name.startswith(_NO_STRATEGY):
        return [(f"Trainer(strategy={name!r})", "a strategy that is installed: geartrain plugins lists them")]
    return []


def _loggers(arguments: Arguments, cls: str = "Trainer", name: str = "logger") -> list[Todo]:
    value = arguments.source(name)
    if value is None:
        return []
    if arguments.literal(name) is True:
        return [(f"{cls}({name}=True)", "plugins=['csv'] and output=DIR, or plugins=['tensorboard']")]
    if "plugins" in arguments.names:
        return [(f"{cls}(plugins=..., {name}=...)", "one list: the loggers go into plugins=[...]")]
    arguments.rename(name, "plugins", value if value.startswith(("[", "(")) else f"[{value}]")
    return []


def _checkpoints(arguments: Arguments) -> list[Todo]:
    if "checkpoint_callback" in arguments.names:
        value = arguments.source("checkpoint_callback")
        assert value is not None
        arguments.drop("checkpoint_callback")
        arguments.extend("callbacks", value)
    return []


def _plugins(arguments: Arguments) -> list[Todo]:
    if "plugins" in arguments.names and not any(name in _PLUGINS for name in arguments.names):
        return []
    for old, plugin in _PLUGINS.items():
        if old in arguments.names and arguments.literal(old) is not ...:
            arguments.drop(old)
            arguments.extend("plugins", f'"{plugin}"')
    return []


def _others(arguments: Arguments) -> list[Todo]:
    for old, new in {"replace_sampler_ddp": "use_distributed_sampler", "default_root_dir": "output", "weights_save_path": "output"}.items():
        if old in arguments.names and new not in arguments.names:
            arguments.rename(old, new)
    rate = arguments.literal("progress_bar_refresh_rate")
    if "progress_bar_refresh_rate" in arguments.names and rate is not ...:
        arguments.drop("progress_bar_refresh_rate")
        if rate == 0:
            arguments.put("enable_progress_bar", "False")
    for old in ("process_position", "flush_logs_every_n_steps"):
        if old in arguments.names:
            arguments.drop(old)
    on_cuda = arguments.literal("accelerator") in ("gpu", "cuda") and "accelerator_options" not in arguments.names
    if arguments.literal("benchmark") is True and on_cuda:
        arguments.rename("benchmark", "accelerator_options", '{"cudnn_benchmark": True}')
        arguments.put("accelerator", '"cuda"')
    if arguments.literal("precision") in ("16-true", "transformer-engine", "transformer-engine-float16"):
        return [(f"Trainer(precision={arguments.source('precision')})", "'16-mixed' or 'bf16-true': see docs/precision.md")]
    if isinstance(arguments.literal("accumulate_grad_batches"), dict):
        return [("Trainer(accumulate_grad_batches={...})", "one number, or a plugin that wraps the step hook")]
    return []
