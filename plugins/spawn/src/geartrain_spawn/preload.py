"""What the forkserver imports before it forks the first rank: all that a rank would spend its first second on."""

import torch._dynamo  # torch's optimizers import it when the first one is made  # noqa: F401

import geartrain.builtin.progress
import geartrain.trainer
import geartrain_spawn.rank
import geartrain_spawn.strategy  # noqa: F401
