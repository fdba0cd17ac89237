"""Names that geartrain's distributions provide, and names that none does: for errors that end in a ``pip install`` line."""

from __future__ import annotations

#: Names that geartrain's own distributions provide: (kind, name) -> distribution. Other names get no install line.
KNOWN = {
    ("accelerator", "cuda"): "geartrain-cuda",
    ("accelerator", "mps"): "geartrain-mps",
    ("strategy", "dp"): "geartrain-dp",
    ("strategy", "ddp2"): "geartrain-dp",
    ("strategy", "ddp"): "geartrain-ddp",
    ("strategy", "ddp_spawn"): "geartrain-spawn",
    ("strategy", "spawn"): "geartrain-spawn",
    ("strategy", "horovod"): "geartrain-horovod",
    ("strategy", "bagua"): "geartrain-bagua",
    **dict.fromkeys(
        [
            ("plugin", name)
            for name in ("early_stopping", "ema", "lr_monitor", "model_checkpoint", "model_summary")
        ]
        + [("plugin", name) for name in ("nan_guard", "norms", "progress", "throughput", "timer")],
        "geartrain-callbacks",
    ),
    ("plugin", "csv"): "geartrain-csv",
    ("plugin", "device_stats"): "geartrain-device-stats",
    ("plugin", "manual_optimisation"): "geartrain-manual",
    ("plugin", "tensorboard"): "geartrain-tensorboard",
    ("plugin", "wandb"): "geartrain-wandb",
    ("plugin", "mlflow"): "geartrain-mlflow",
    **dict.fromkeys(
        [
            ("command", name)
            for name in ("fit", "validate", "test", "predict", "explain", "plugins")
        ],
        "geartrain-cli",
    ),
    ("command", "conformance"): "geartrain-testing",
    ("command", "doctor"): "geartrain-doctor",
    ("command", "new"): "geartrain-testing",
    ("command", "port"): "geartrain-port",
    ("command", "tune"): "geartrain-tuner",
}

#: All of geartrain's own distributions.
DISTRIBUTIONS = {
    "geartrain",
    "geartrain-parallel",
    "geartrain-session",
    "geartrain-torchmetrics",
    *KNOWN.values(),
}

#: Hooks that geartrain's own distributions bring -> (kind, name) of the plugin.
HOOKS = {"reduce_bucket": ("strategy", "ddp")}

#: Names that users of Lightning may type and that no distribution provides.
NOT_SHIPPED = {("accelerator", name) for name in ("tpu", "hpu", "ipu", "xla")} | {
    ("strategy", name)
    for name in (
        "ddp_sharded",
        "ddp_sharded_spawn",
        "ddp_fully_sharded",
        "deepspeed",
        "fsdp",
        "tpu",
        "tpu_spawn",
        "xla",
        "colossalai",
    )
}
