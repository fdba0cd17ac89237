"""The names of ``geartrain.plugin_api`` whose modules import torch."""

from geartrain.checkpoint.checkpoints import (
    checkpoint_state as checkpoint_state,
    find_checkpoint_file as find_checkpoint_file,
    save_checkpoint_file as save_checkpoint_file,
)
from geartrain.checkpoint.files import progress as progress
from geartrain.checkpoint.training_state import load_optimizer as load_optimizer
from geartrain.data.loaders import (
    BatchSizer as BatchSizer,
    MappedBatches as MappedBatches,
    close_batches as close_batches,
    count_batches as count_batches,
    length as length,
    loader_batch_size as loader_batch_size,
    single_loaders as single_loaders,
)
from geartrain.data.seeding import drawing_from as drawing_from
from geartrain.data.sharding import (
    Shard as Shard,
    batches_in_turn as batches_in_turn,
    generators as generators,
    is_empty_shard as is_empty_shard,
    samplers as samplers,
    set_epoch as set_epoch,
    with_samplers as with_samplers,
)
from geartrain.data.sources import DataSource as DataSource
from geartrain.launch.forks import (
    call_before_forks as call_before_forks,
    share_temporary_folder as share_temporary_folder,
)
from geartrain.launch.signals import raise_on_signals as raise_on_signals
from geartrain.loop.events import Events as Events
from geartrain.loop.fit import backward as backward, end_of_epoch as end_of_epoch
from geartrain.loop.optimizers import (
    about_to_step as about_to_step,
    mean_over_ranks as mean_over_ranks,
    needs_closure as needs_closure,
    parameters_of as parameters_of,
    read_optimizers as read_optimizers,
)
from geartrain.loop.ranks import RankCoordinator as RankCoordinator
from geartrain.loop.step_forwarder import (
    STEPS as STEPS,
    StepForwarder as StepForwarder,
    check_data as check_data,
    check_module as check_module,
    refuse_unrun as refuse_unrun,
)
from geartrain.loop.worker import (
    always_tear_down as always_tear_down,
    init_process_group as init_process_group,
)
from geartrain.metrics import reductions as reductions
from geartrain.metrics.experiment import experiment as experiment
from geartrain.metrics.local import LocalMetric as LocalMetric, MetricOptions as MetricOptions
from geartrain.metrics.objects import libraries as libraries
from geartrain.metrics.store import (
    MetricStore as MetricStore,
    check_name as check_name,
    scalar as scalar,
)
from geartrain.module.module import overridden as overridden
from geartrain.module.nested import (
    map_nested as map_nested,
    map_tensors as map_tensors,
    move as move,
    not_plain as not_plain,
)
from geartrain.planning.components import Setup as Setup
