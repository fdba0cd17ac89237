"""Port the arguments of Lightning's callbacks, loggers and functions."""

from __future__ import annotations

from collections.abc import Mapping

from geartrain_port.arguments import Arguments
from geartrain_port.calls import Todos

#: Class -> its positional arguments in order, and arguments with their names in geartrain; "" drops
#: an argument.
_CLASSES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "EarlyStopping": (
        ("monitor", "min_delta", "patience", "verbose", "mode"),
        {"log_rank_zero_only": ""},
    ),
    "BackboneFinetuning": (
        (
            *("unfreeze_backbone_at_epoch", "lambda_func", "backbone_initial_ratio_lr"),
            *("backbone_initial_lr", "should_align", "initial_denom_lr", "train_bn"),
            *("verbose", "rounding"),
        ),
        {"initial_denom_lr": "", "verbose": "", "rounding": ""},
    ),
    "StochasticWeightAveraging": (
        (
            *("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy"),
            *("avg_fn", "device"),
        ),
        {"device": ""},
    ),
    "seed_everything": (("seed", "workers"), {"workers": "", "verbose": ""}),
    "Timer": (("duration", "interval", "verbose"), {"verbose": ""}),
    "ThroughputMonitor": (("batch_size_fn", "length_fn"), {"world_size": ""}),
    "DeviceStatsMonitor": (("cpu_stats",), {}),
    "GPUStatsMonitor": (
        ("memory_utilization", "gpu_utilization"),
        dict.fromkeys(
            (
                "memory_utilization",
                "gpu_utilization",
                "intra_step_time",
                "inter_step_time",
                "fan_speed",
                "temperature",
            ),
            "",
        ),
    ),
    "RichProgressBar": (("refresh_rate", "leave"), {"theme": "", "console_kwargs": ""}),
    "TQDMProgressBar": (("refresh_rate", "process_position", "leave"), {"process_position": ""}),
    "RichModelSummary": (("max_depth",), {}),
    "ModelCheckpoint": (
        ("dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k"),
        {"enable_version_counter": ""},
    ),
    "WandbLogger": (("name", "save_dir"), {"dir": "folder", "save_dir": "folder", "anonymous": ""}),
    "MLFlowLogger": (
        ("experiment_name", "run_name", "tracking_uri", "tags"),
        {"experiment_name": "experiment", "synchronous": ""},
    ),
}
#: Classes whose first argument is a different one in geartrain.
_REORDERED = ("DeviceStatsMonitor", "MLFlowLogger", "ModelCheckpoint", "WandbLogger")
#: Class -> arguments without a counterpart.
_LEFT = {
    "StochasticWeightAveraging": ("avg_fn",),
    "WandbLogger": ("version", "id", "experiment", "prefix", "checkpoint_name"),
    "MLFlowLogger": ("save_dir", "prefix", "artifact_location", "run_id"),
    "TensorBoardLogger": ("default_hp_metric", "prefix", "sub_dir"),
    "CSVLogger": ("prefix",),
}


def plain(cls: str, arguments: Arguments, has_folder: bool = False) -> list[Todos]:
    """Port the arguments of a callback, a logger or a function.

    Args:
        cls: Lightning's name.
        arguments: changed in place.
        has_folder: True if the run has a folder, which is then the default for files.

    Returns:
        Things left to do by hand.
    """
    if cls == "ModelCheckpoint":
        _checkpoints(arguments, has_folder)
    if (
        cls == "CSVLogger"
        and "save_dir" in arguments.names
        and not isinstance(arguments.literal("version"), int)
    ):
        means = (
            "it writes one file, and the next run is refused: give each run a path. "
            "Lightning makes a folder version_N for each run"
        )
        arguments.changed.append(("CSVLogger(save_dir=...)", means))
    if cls in ("TensorBoardLogger", "CSVLogger"):
        _place(cls, arguments)
    order, renamed = _CLASSES.get(cls, ((), {}))
    for name in list(arguments.names):
        new = renamed.get(name)
        if new == "":
            arguments.drop(name)
        elif new is not None:
            arguments.rename(name, new)
        elif name in order and (name != order[0] or cls in _REORDERED):
            arguments.rename(name, name)  # name it: its position may be another one in geartrain
    for special in (_offline, _upload):
        special(cls, arguments)
    return [
        (f"{cls}({name}=...)", "nothing: leave it out")
        for name in arguments.names
        if name in _LEFT.get(cls, ())
    ]


def _checkpoints(arguments: Arguments, has_folder: bool) -> None:
    """Set a folder for checkpoints, because geartrain has no default."""
    if "dirpath" in arguments.names and arguments.literal("dirpath") is None:
        arguments.drop("dirpath")
    if not {"dirpath", "*", "**"} & set(arguments.names) and not has_folder:
        arguments.put("dirpath", '"checkpoints"')
        means = (
            "its files are in checkpoints, those of all runs; "
            "Lightning's are in lightning_logs/version_N/checkpoints"
        )
        arguments.changed.append(("ModelCheckpoint(...)", means))


def _place(cls: str, arguments: Arguments) -> None:
    """Replace ``save_dir``, ``name`` and ``version`` by one folder or file."""
    parts = []
    for name in ("save_dir", "name", "version"):
        if name in arguments.names:
            parts.append((arguments.literal(name), arguments.source(name)))
    if "save_dir" in arguments.names:
        literal = [value for value, _ in parts if value not in (None, "")]
        if all(isinstance(value, str | int) for value in literal):
            path = (
                '"' + "/".join(f"version_{v}" if isinstance(v, int) else v for v in literal) + '"'
            )
        else:
            path = "f" + repr(
                "/".join(
                    "{" + str(source) + "}" if value is ... else str(value)
                    for value, source in parts
                )
            )
        for name in ("name", "version"):
            if name in arguments.names:
                arguments.drop(name)
        single = len(parts) == 1 and parts[0][0] is ...
        if cls == "TensorBoardLogger":
            arguments.rename("save_dir", "folder", parts[0][1] if single else path)
        else:
            arguments.rename("save_dir", "path", path[:-1] + "/metrics.csv" + path[-1])
    if cls == "TensorBoardLogger" and "log_graph" in arguments.names:
        arguments.rename("log_graph", "graph")
    if "flush_logs_every_n_steps" in arguments.names:
        arguments.drop("flush_logs_every_n_steps")


def _offline(cls: str, arguments: Arguments) -> None:
    if cls == "WandbLogger" and "offline" in arguments.names:
        if arguments.literal("offline") is False:
            arguments.drop("offline")
        else:
            sure = arguments.literal("offline") is True
            arguments.rename(
                "offline",
                "mode",
                '"offline"' if sure else f'"offline" if {arguments.source("offline")} else None',
            )


def _upload(cls: str, arguments: Arguments) -> None:
    if cls in ("WandbLogger", "MLFlowLogger") and "log_model" in arguments.names:
        arguments.rename(
            "log_model",
            "checkpoints",
            None if arguments.literal("log_model") in (True, False) else "True",
        )


#: Class -> the names of its positional arguments.
POSITIONAL: Mapping[str, tuple[str, ...]] = {
    name: order for name, (order, _) in _CLASSES.items()
} | {
    "TensorBoardLogger": ("save_dir", "name", "version", "log_graph"),
    "CSVLogger": ("save_dir", "name", "version"),
    "LightningCLI": ("", "", "save_config_callback"),
}
