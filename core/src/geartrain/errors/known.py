"""Names that geartrain's distributions provide, for errors that end in a ``pip install`` line."""

from __future__ import annotations

#: Distribution of ours, a kind, and the names of this kind that it provides.
PROVIDED = """
generated: distributions
geartrain-bagua strategy bagua
geartrain-callbacks precision 16-mixed 64-true bf16-mixed bf16-true
geartrain-callbacks plugin accumulation_scheduler async_checkpoint backbone_finetuning compile csv
geartrain-callbacks plugin detect_anomaly deterministic early_stopping ema evaluation_outputs fast
geartrain-callbacks plugin fit_memory lr_monitor manual_optimisation model_checkpoint model_summary
geartrain-callbacks plugin nan_guard norms overfit overrides partial_weights prediction_writer
geartrain-callbacks plugin progress progress_lines provenance reload_dataloaders swa throughput
geartrain-callbacks plugin timed_validation timer training_outputs
geartrain-cli plugin locked
geartrain-cli command explain fit plugins predict test validate
geartrain-cuda accelerator cuda
geartrain-ddp strategy ddp
geartrain-deepspeed strategy deepspeed
geartrain-devices accelerator npu xpu
geartrain-dp strategy ddp2 dp
geartrain-elastic strategy elastic
geartrain-elastic command scale
geartrain-horovod strategy horovod
geartrain-mlflow plugin mlflow
geartrain-monitor plugin capture_check device_stats profile
geartrain-mps accelerator mps
geartrain-parallel plugin sync_batchnorm
geartrain-port command port
geartrain-resilience plugin chaos preemption remote restarts sentinel
geartrain-session
geartrain-sharded strategy ddp_sharded fsdp tensor_parallel
geartrain-sharded plugin activation_checkpointing
geartrain-spawn strategy ddp_spawn spawn
geartrain-tensorboard plugin tensorboard
geartrain-testing command conformance new
geartrain-tools command ckpt compare doctor report tune verify
geartrain-tpu accelerator tpu
geartrain-wandb plugin wandb
end of distributions
"""
_ROWS = [line.split() for line in PROVIDED.splitlines() if line.startswith("geartrain-")]
#: (kind, name) -> the distribution of ours that provides it. Other names get no install line.
KNOWN = {(row[1], name): row[0] for row in _ROWS for name in row[2:]}
#: All of geartrain's own distributions.
DISTRIBUTIONS = {"geartrain", *(row[0] for row in _ROWS)}

#: Hooks that geartrain's own distributions bring -> (kind, name) of the plugin.
HOOKS = {"reduce_bucket": ("strategy", "ddp")}
