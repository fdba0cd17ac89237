"""Port the arguments of ``Trainer``, ``Fabric``, ``LightningCLI`` and ``fit``."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import libcst as cst

from geartrain import Trainer
from geartrain_port import names
from geartrain_port.arguments import Arguments

#: Something left to do by hand: the code, and the text to write.
Todos = tuple[str, str]

_KNOWN = [name for name in inspect.signature(Trainer).parameters if name != "unknown"]
#: Values of accelerator= and distributed_backend= that were strategies.
_STRATEGIES = ("dp", "ddp", "ddp2", "ddp_spawn", "horovod", "bagua")
#: Names, or their first parts, of strategies that no geartrain distribution has.
_NO_STRATEGY = (
    "deepspeed_",
    "ddp_sharded_spawn",
    "ddp_fully_sharded",
    "xla",
    "tpu",
    "colossalai",
    "hpu",
    "ipu",
)
#: Argument -> the plugin that does the same.
_PLUGINS = {
    "enable_model_summary": "model_summary",
    "weights_summary": "model_summary",
    "log_gpu_memory": "device_stats",
    "track_grad_norm": "norms",
    "terminate_on_nan": "nan_guard",
}
#: Argument -> values with which it can be dropped: they do nothing, or geartrain's default.
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
    "benchmark": (False, None),
    "barebones": (False,),
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
    "gradient_clip_val": (0, 0.0, None),
    "max_steps": (None,),
    "deterministic": (None,),
}


#: Words that a file with several optimizers or with manual optimisation has.
OWN_STEPS = {"automatic_optimization", "manual_backward", "optimizer_idx"}
COUNTS_BATCHES = "it counts batches; Lightning counts each step of each optimizer"
_IN_LIGHTNING = {
    "checkpoints": "saves a checkpoint after each epoch (enable_checkpointing)",
    "logs": "logs to lightning_logs (logger)",
}


def trainer(arguments: Arguments, words: Collection[str] = ()) -> list[Todos]:
    """Port the arguments of ``Trainer(...)``.

    Args:
        arguments: changed in place.
        words: every name in the file.

    Returns:
        Things left to do by hand; so do the other functions.
    """
    todo: list[Todos] = []
    _note_changes(arguments, words)
    for name in list(arguments.names):
        if name in _NOTHING and arguments.literal(name) in _NOTHING[name]:
            arguments.drop(name)
    for step in (_devices, _strategy, _loggers, _checkpoints, _plugins, _others):
        todo += step(arguments)
    for name in arguments.names:
        if name in names.OF_TRAINER_CALL:
            todo.append((f"Trainer({name}=...)", names.OF_TRAINER_CALL[name]))
        elif name == "**":
            message = "check its names: geartrain refuses those that it does not have"
            todo.append(("Trainer(**...)", message))
        elif name in ("", "*"):
            todo.append(
                ("Trainer's positional arguments", "name them: accelerator=..., devices=...")
            )
        elif name not in _KNOWN:
            todo.append((f"Trainer({name}=...)", "nothing: see docs/from-lightning.md"))
    return todo


def _note_changes(arguments: Arguments, words: Collection[str]) -> None:
    """Add the arguments, or missing arguments, with a different meaning in geartrain."""
    note, names_given = arguments.changed.append, set(arguments.names)
    folders = [
        name
        for name in ("default_root_dir", "weights_save_path")
        if name in names_given and arguments.literal(name) is not None
    ]
    for name in folders:
        message = (
            f"output={arguments.source(name)} is the folder of one run, and the next run is "
            "refused in it: give each run its own folder"
        )
        note((f"Trainer({name}=...)", message))
    lost = set(_IN_LIGHTNING)
    writes = folders or "output" in names_given
    if writes or arguments.literal("fast_dev_run") not in (..., False, 0):
        lost.clear()
    if "ModelCheckpoint" in words or any(
        arguments.literal(name) is False for name in ("enable_checkpointing", "checkpoint_callback")
    ):
        lost.discard("checkpoints")
    if names_given & {"logger", "plugins"}:
        lost.discard("logs")
    if lost:
        does = " and ".join(_IN_LIGHTNING[one] for one in sorted(lost))
        message = (
            f"Lightning {does}; here nothing is written without output=DIR, a ModelCheckpoint "
            "or a logger"
        )
        note(("Trainer(...)", message))
    if (
        "max_steps" in names_given
        and arguments.literal("max_steps") != -1
        and OWN_STEPS & set(words)
    ):
        note(("Trainer(max_steps=...)", f"{COUNTS_BATCHES}: divide it by the steps per batch"))
    if arguments.literal("track_grad_norm") not in (..., -1, None):
        message = "2-norms are logged in each step, as grad_norm and grad_norm/NAME"
        note(("Trainer(track_grad_norm=...)", message))
    chosen = names_given & {"strategy", "distributed_backend", "accelerator"}
    if not chosen and arguments.literal("gpus") not in (..., None, 0, 1, "0", "1", []):
        message = (
            "Lightning used ddp_spawn for several GPUs; here ddp runs the script once per GPU. "
            "Set strategy='ddp_spawn' for the old behaviour"
        )
        note(("Trainer(gpus=...)", message))


def fabric(arguments: Arguments) -> list[Todos]:
    """Port the arguments of ``Fabric(...)``, whose loggers become plugins."""
    if "loggers" in arguments.names and arguments.literal("loggers") in (None, []):
        arguments.drop("loggers")
    return _loggers(arguments, "Fabric", "loggers")


#: Arguments of LightningCLI to drop: about its saved configuration, or without a meaning in
#: geartrain.
_OF_CLI = (
    "save_config_callback",
    "save_config_kwargs",
    "save_config_filename",
    "save_config_overwrite",
    "save_config_multifile",
    "auto_configure_optimizers",
    "auto_registry",
    "description",
    "env_prefix",
    "env_parse",
)


def cli(arguments: Arguments, fits: bool) -> list[Todos]:
    """Port the arguments of ``LightningCLI(...)`` to ``gt.cli(...)``.

    Args:
        arguments: changed in place.
        fits: True if the next statement calls fit, which ``gt.cli`` does itself.
    """
    given = "save_config_callback" in arguments.names
    saves = not given or arguments.literal("save_config_callback") is not None
    nothing: dict[str, tuple[Any, ...]] = {
        "run": (True, False) if fits else (True,),
        "subclass_mode_model": (False,),
        "subclass_mode_data": (False,),
        "trainer_class": (None,),
        "datamodule_class": (None,),
        "trainer_defaults": (None,),
        "seed_everything_default": (True, False, None),
    }
    for name in list(arguments.names):
        literal = arguments.literal(name) if name else ...
        if name in _OF_CLI or any(literal is value for value in nothing.get(name, ())):
            arguments.drop(name)
    for old, new in {"model_class": "model", "datamodule_class": "data", "args": "argv"}.items():
        if old in arguments.names:
            arguments.rename(old, new)
    todo = _defaults(arguments)
    if not {"", "model"} & set(arguments.names):
        message = "the classes: gt.cli(MyModule, MyDataModule); or geartrain fit FILE.py:CLASS"
        todo.append(("LightningCLI without a class", message))
    for place, name in enumerate(arguments.names):
        if name not in ("", "model", "data", "argv", "defaults") or (name == "" and place > 1):
            unknown = "nothing: gt.cli takes the module's and the data's class"
            todo.append((f"LightningCLI({name}=...)", _LEFT_OF_CLI.get(name, unknown)))
    means = (
        "options are those of geartrain fit: --max-epochs, not --trainer.max_epochs, "
        "and no section trainer in a config file"
    )
    arguments.changed.append(("LightningCLI(...)", means))
    if saves:
        means = "no config.yaml is saved: --print-config prints one, and output=DIR has plan.json"
        arguments.changed.append(("LightningCLI(...)", means))
    return todo


def _defaults(arguments: Arguments) -> list[Todos]:
    """Port literal ``trainer_defaults`` and ``seed_everything_default`` to ``defaults``."""
    todo: list[Todos] = []
    given = arguments.literal("trainer_defaults") if "trainer_defaults" in arguments.names else {}
    if isinstance(given, dict) and all(
        isinstance(name, str) and name.isidentifier() for name in given
    ):
        call = cst.ensure_type(
            cst.parse_expression(
                f"Trainer({', '.join(f'{name}={value!r}' for name, value in given.items())})"
            ),
            cst.Call,
        )
        made = Arguments(call)
        todo += trainer(made)
        arguments.changed += made.changed
        options = {name: made.literal(name) for name in made.names}
        if options:
            arguments.rename("trainer_defaults", "defaults", repr(options))
        elif "trainer_defaults" in arguments.names:
            arguments.drop("trainer_defaults")
    else:
        return []
    seed = arguments.literal("seed_everything_default")
    if isinstance(seed, int) and not isinstance(seed, bool):
        arguments.drop("seed_everything_default")
        arguments.put("defaults", repr({**options, "seed": seed}))
    return todo


_LEFT_OF_CLI = {
    **dict.fromkeys(
        ("subclass_mode_model", "subclass_mode_data"),
        "the class itself; or geartrain fit FILE.py:CLASS",
    ),
    "run": (
        "gt.cli(...) alone, which runs fit at once: move earlier statements to __init__ or setup; "
        "or use a Trainer and its fit"
    ),
    "trainer_defaults": "a file of options, which --config FILE reads",
    "seed_everything_default": "--seed N",
    "parser_kwargs": "--config FILE",
    "trainer_class": "a plugin, which gt.cli takes with --plugin FILE.py",
    "": "name the arguments",
}


def fit(arguments: Arguments) -> list[Todos]:
    """Port ``trainer.fit(ckpt_path=...)``: only ``"last"``, ``"hpc"`` and ``"registry"`` differ."""
    given = arguments.literal("ckpt_path") if "ckpt_path" in arguments.names else None
    if given == "last":  # like "auto", Lightning's "last" does nothing if no checkpoint exists
        arguments.put("ckpt_path", '"auto"')
    elif given in ("hpc", "registry"):
        return [(f"Trainer.fit(ckpt_path={given!r})", "ckpt_path=FILE")]
    return []


def loading(call: cst.Call) -> tuple[Arguments, list[Todos]]:
    """Port ``MyModel.load_from_checkpoint(...)``."""
    arguments = Arguments(call, ("checkpoint_path", "map_location"))
    if "map_location" in arguments.names:
        arguments.rename("map_location", "map_location")  # by keyword
    todo: list[Todos] = []
    for name in [name for name in arguments.names if name in names.OF_LOADING]:
        if names.OF_LOADING[name]:
            todo.append((f"load_from_checkpoint({name}=...)", names.OF_LOADING[name]))
        else:
            arguments.drop(name)
    return arguments, todo


def _devices(arguments: Arguments) -> list[Todos]:
    todo: list[Todos] = []
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
            message = "accelerator='cpu' and no devices if it is 0 or None"
            todo.append((f"Trainer({old}={arguments.source('devices')})", message))
    if "num_processes" in arguments.names and "devices" not in arguments.names:
        arguments.rename("num_processes", "devices")
        if "accelerator" not in arguments.names:
            arguments.put("accelerator", '"cpu"', after="devices")
    if arguments.literal("auto_select_gpus") is True:
        arguments.rename("auto_select_gpus", "accelerator_options", '{"auto_select": True}')
        if arguments.literal("accelerator") == "gpu":
            arguments.put("accelerator", '"cuda"')
    return todo


def _as_strategy(arguments: Arguments, old: str) -> None:
    """Port ``accelerator="ddp"`` to a strategy."""
    name = str(arguments.literal(old))
    if "strategy" in arguments.names:
        arguments.drop(old)
    else:
        arguments.rename(old, "strategy", '"ddp_spawn"' if name == "ddp_cpu" else None)
    if name == "ddp_cpu":
        arguments.put("accelerator", '"cpu"', after="strategy")


def _strategy(arguments: Arguments) -> list[Todos]:
    name = arguments.literal("strategy")
    if isinstance(name, str) and name in names.SPELT:
        new, options = names.SPELT[name]
        arguments.put("strategy", f'"{new}"')
        if options:
            arguments.put("strategy_options", options.replace("'", '"'), after="strategy")
    elif isinstance(name, str) and name.startswith(_NO_STRATEGY):
        message = "an installed strategy: geartrain plugins lists them"
        return [(f"Trainer(strategy={name!r})", message)]
    return []


def _loggers(arguments: Arguments, cls: str = "Trainer", name: str = "logger") -> list[Todos]:
    value = arguments.source(name)
    if value is None:
        return []
    if arguments.literal(name) is True:
        return [
            (f"{cls}({name}=True)", "plugins=['csv'] and output=DIR, or plugins=['tensorboard']")
        ]
    if "plugins" in arguments.names:
        return [(f"{cls}(plugins=..., {name}=...)", "one list: the loggers go into plugins=[...]")]
    arguments.rename(name, "plugins", value if value.startswith(("[", "(")) else f"[{value}]")
    return []


def _checkpoints(arguments: Arguments) -> list[Todos]:
    if "checkpoint_callback" in arguments.names:
        value = arguments.source("checkpoint_callback")
        assert value is not None
        arguments.drop("checkpoint_callback")
        arguments.extend("callbacks", value)
    return []


def _plugins(arguments: Arguments) -> list[Todos]:
    if "plugins" in arguments.names and not any(name in _PLUGINS for name in arguments.names):
        return []
    for old, plugin in _PLUGINS.items():
        if old in arguments.names and arguments.literal(old) is not ...:
            arguments.drop(old)
            arguments.extend("plugins", f'"{plugin}"')
    return []


def _others(arguments: Arguments) -> list[Todos]:
    for old, new in {
        "replace_sampler_ddp": "use_distributed_sampler",
        "default_root_dir": "output",
        "weights_save_path": "output",
    }.items():
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
    on_cuda = (
        arguments.literal("accelerator") in ("gpu", "cuda")
        and "accelerator_options" not in arguments.names
    )
    if arguments.literal("benchmark") is True and on_cuda:
        arguments.rename("benchmark", "accelerator_options", '{"cudnn_benchmark": True}')
        arguments.put("accelerator", '"cuda"')
    unsupported = ("16-true", "transformer-engine", "transformer-engine-float16")
    if arguments.literal("precision") in unsupported:
        message = "'16-mixed' or 'bf16-true': see docs/precision.md"
        return [(f"Trainer(precision={arguments.source('precision')})", message)]
    if isinstance(arguments.literal("accumulate_grad_batches"), dict):
        message = "one number, or a plugin that wraps the step hook"
        return [("Trainer(accumulate_grad_batches={...})", message)]
    return []
