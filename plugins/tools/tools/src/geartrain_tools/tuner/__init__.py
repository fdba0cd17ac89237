"""Find a learning rate and a batch size before training. Names are as in PyTorch Lightning.

- ``Tuner(trainer).lr_find(model)``: the learning rate at which the loss falls fastest;
  :class:`LRFinder` is the result.
- ``Tuner(trainer).scale_batch_size(model)``: the largest batch that fits in memory;
  :class:`Trial` is one try.

``geartrain tune lr TARGET`` and ``geartrain tune batch-size TARGET`` are the same as commands.
"""

from __future__ import annotations

from geartrain_tools.tuner.batch_size import Trial
from geartrain_tools.tuner.lr import LRFinder
from geartrain_tools.tuner.tuner import Tuner

__all__ = ["LRFinder", "Trial", "Tuner"]
