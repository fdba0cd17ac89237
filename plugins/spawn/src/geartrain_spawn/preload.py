"""What the forkserver imports before it forks the first rank: all that a rank would spend its first second on."""

import torch._dynamo  # noqa: F401 (torch's optimizers import it when the first one is made)

import geartrain.builtin.progress  # noqa: F401
import geartrain_spawn.rank
import geartrain_spawn.strategy  # noqa: F401
