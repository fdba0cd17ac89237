"""The names of ``geartrain.plugin_api`` whose modules import torch."""

from geartrain.checkpoint.files import read as read_checkpoint
from geartrain.checkpoint.training_state import load_optimizer
from geartrain.data.loaders import BatchSizer, MappedBatches, close_batches, length
from geartrain.data.seeding import drawing_from
from geartrain.data.sources import DataSource
from geartrain.data.stage import Stage, with_samplers
from geartrain.launch.signals import raise_on_signals
from geartrain.loop.optimizers import parameters_of
from geartrain.loop.ranks import RankCoordinator
from geartrain.loop.shortcuts import plain_step, put_off_compiler, step_optimizer
from geartrain.loop.step_forwarder import StepForwarder, check_module
from geartrain.metrics import reductions
from geartrain.metrics.experiment import experiment
from geartrain.metrics.local import LocalMetric, MetricOptions
from geartrain.metrics.objects import libraries
from geartrain.module.module import match_names, overridden
from geartrain.module.nested import map_nested, map_tensors, move, not_plain
from geartrain.planning.trainer_base import TrainerBase
