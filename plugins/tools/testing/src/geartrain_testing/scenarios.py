"""The scenarios of conformance programs, by name: each runs one or several trainers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_testing import nets
from geartrain_testing.nets import Net, samples
from geartrain_testing.recorder import Barriers, Collectives, Listening

if TYPE_CHECKING:
    from geartrain_testing.program import Job

SCENARIOS: dict[str, Callable[[Job], None]] = {}
#: Samples of the evaluation set, a prime number that no number of ranks divides; its batch size.
EVALUATED, EVALUATION_BATCH = 103, 5


def scenario(function: Callable[[Job], None]) -> Callable[[Job], None]:
    """Register a scenario under its function's name."""
    SCENARIOS[function.__name__] = function
    return function


def _evaluated() -> DataLoader[object]:
    return DataLoader(samples(EVALUATED), EVALUATION_BATCH)


# --- training: N ranks equal one process ----------------------------------------------------------


@scenario
def sgd(job: Job) -> None:
    job.fit(Net(), max_epochs=2)


@scenario
def adam(job: Job) -> None:
    job.fit(Net(optimizer="adam"), max_epochs=2)


@scenario
def many_buckets(job: Job) -> None:
    # 4 MiB of gradients in layers of 2 MiB: DDP's first bucket holds one layer.
    job.fit(Net(width=512), batches=4)


@scenario
def accumulation(job: Job) -> None:
    job.fit(Net(), accumulate_grad_batches=3)  # windows of 3, 3 and 1


@scenario
def clipping(job: Job) -> None:
    job.fit(Net(), gradient_clip_val=0.05)


@scenario
def two_optimizers(job: Job) -> None:
    job.fit(Net(optimizer="two"))


@scenario
def frozen(job: Job) -> None:
    job.fit(nets.Frozen())


@scenario
def unused_parameters(job: Job) -> None:
    job.fit(nets.Unused(job.ranks))


@scenario
def scheduler(job: Job) -> None:
    job.fit(nets.Scheduled())


@scenario
def step_end(job: Job) -> None:
    trainer, module = job.trainer(), nets.Parts()
    trainer.fit(module, job.batches(7), _evaluated())
    job.keep(trainer, module)


@scenario
def fit_twice(job: Job) -> None:
    trainer, module = job.trainer(), Net()
    for _ in range(2):
        trainer.fit(module, job.batches(4))
        job.keep(trainer, module)


@scenario
def weighted_loss(job: Job) -> None:
    job.fit(nets.Weighted(), accumulate_grad_batches=3)  # windows of 3, 3 and 1


# --- training: ranks agree with each other --------------------------------------------------------


@scenario
def buffers(job: Job) -> None:
    job.fit(Net(norm=True))


@scenario
def start_apart(job: Job) -> None:
    job.fit(nets.Apart())


@scenario
def every_step(job: Job) -> None:
    trainer, module = job.trainer(log_every_n_steps=50), nets.EveryStep(job.ranks)
    trainer.fit(module)
    job.keep(trainer, module)


@scenario
def unfreezing(job: Job) -> None:
    job.fit(nets.Unfreezes(job.ranks), batches=6)


@scenario
def communication(job: Job) -> None:
    job.fit(nets.OwnEntries(job.ranks), max_epochs=2)


@scenario
def no_sync(job: Job) -> None:
    job.fit(nets.Gradients(), batches=2, accumulate_grad_batches=2)


# --- checkpoints ----------------------------------------------------------------------------------


@scenario
def resume(job: Job) -> None:
    """``adam``, in two runs: an epoch, and another from the checkpoint of the first."""
    folder = job.folder / "output"
    checkpoint = folder / "last.ckpt"
    job.fit(Net(optimizer="adam"), output=str(folder))
    if checkpoint.exists():  # else the case fails
        trainer, module = job.trainer(max_epochs=2), Net(optimizer="adam")
        for parameter in module.parameters():
            parameter.detach().zero_()  # the checkpoint has the weights
        trainer.fit(module, job.batches(7), ckpt_path=checkpoint)
        job.keep(trainer, module)


# --- data -----------------------------------------------------------------------------------------


@scenario
def training_coverage(job: Job) -> None:
    data = samples(5 * job.request.global_batch + 1)
    trainer, module = job.trainer(max_epochs=2, seed=1), Net()
    trainer.fit(module, DataLoader(data, job.request.batch, shuffle=True))


@scenario
def evaluation_coverage(job: Job) -> None:
    trainer, module = job.trainer(), nets.Metrics()
    for run in (trainer.validate, trainer.test, trainer.predict):
        result = run(module, _evaluated())
        job.keep(trainer, module, result)


@scenario
def rank_without_samples(job: Job) -> None:
    trainer, module = job.trainer(), nets.Metrics()
    result = trainer.validate(module, DataLoader(samples(1), EVALUATION_BATCH))
    job.keep(trainer, module, result)


@scenario
def uneven_inputs(job: Job) -> None:
    trainer, module = job.trainer(), nets.GathersInValidation()
    # One sample more than all ranks have in one batch: one rank has two batches.
    result = trainer.validate(
        module, DataLoader(samples(job.ranks * EVALUATION_BATCH + 1), EVALUATION_BATCH)
    )
    job.keep(trainer, module, result)


@scenario
def uneven_training(job: Job) -> None:
    trainer, module = job.trainer(), nets.Streams()
    trainer.fit(module)
    job.keep(trainer, module)


# --- metrics, collectives, the caller's view ------------------------------------------------------


@scenario
def metrics(job: Job) -> None:
    trainer, module = job.trainer(), nets.Metrics()
    result = trainer.validate(module, _evaluated())
    job.keep(trainer, module, result)


@scenario
def collectives(job: Job) -> None:
    trainer, module = job.trainer(Collectives()), Net()
    trainer.validate(module, job.batches(1))


@scenario
def barrier(job: Job) -> None:
    trainer, module = job.trainer(Barriers(str(job.folder))), Net()
    trainer.validate(module, job.batches(1))


@scenario
def listens(job: Job) -> None:
    trainer, module = job.trainer(Listening()), Net()
    trainer.fit(module, job.batches(2))


@scenario
def fit_validate_test(job: Job) -> None:
    trainer, module = job.trainer(max_epochs=2), Net()
    trainer.fit(module, job.batches(4), _evaluated())
    job.keep(trainer, module)
    for run in (trainer.validate, trainer.test):
        result = run(module, _evaluated())
        job.keep(trainer, module, result)


PLUGIN = '''\
"""Records its option in the module's notes."""

from geartrain import hookimpl


class FromFile:
    def __init__(self, text: str = "the default") -> None:
        self.text = text

    @hookimpl
    def on_run_start(self, run):
        run.module.notes["file plugin"] = self.text
'''


class FromObject:
    """A plugin object with state, made by the program."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    @gt.hookimpl
    def on_run_start(self, run: gt.Run) -> None:
        nets.notes_of(run)["object plugin"] = list(self.numbers)


@scenario
def plugins(job: Job) -> None:
    # A program may run this for several requests, and Python loads a module name once.
    name = "conformance_plugin_" + re.sub(r"\W", "_", job.folder.parent.name)
    path = job.folder / f"{name}.py"
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(PLUGIN)
    written.replace(path)  # atomic, because another rank may read the file now
    trainer = job.trainer(
        str(path), FromObject([1, 2]), plugin_options={name: {"text": "as chosen"}}
    )
    trainer.validate(Net(), job.batches(1))


# --- programs with one scenario-------------------------------------------------------------------


@scenario
def key_on_one_rank(job: Job) -> None:
    job.fit(nets.LogsOnOneRank())


@scenario
def alternating_parameters(job: Job) -> None:
    job.fit(nets.Alternating())


@scenario
def killed(job: Job) -> None:
    """``adam``, with a rank that dies."""
    job.fit(nets.Dies(str(job.folder / "killed")), max_epochs=2)


@scenario
def fault(job: Job) -> None:
    module = nets.Faulty(**job.request.fault, marks=str(job.folder))
    # The run's folder may keep ranks' logs after a failure. The folder for temporary files may not.
    trainer = job.trainer(max_epochs=2, output=str(job.folder / "output"))
    if job.request.fault["where"] == "test_step":
        trainer.test(module, _evaluated())
    else:
        trainer.fit(module, job.batches(7), _evaluated())
    (job.folder / f"survived-{trainer.global_rank}").touch()
