"""``prediction_writer``: write predictions to files while ``predict`` runs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from geartrain import Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import map_tensors, replacing, user_path, with_samplers
from geartrain_callbacks.callback import Adapter, Callback

if TYPE_CHECKING:
    from geartrain import Module, Trainer

_INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions: each rank writes its own.

    Override :meth:`write_on_batch_end`, :meth:`write_on_epoch_end` or both. ``trainer.predict``
    then keeps no output and returns ``None``, unless it is called with
    ``return_predictions=True``. A batch that a rank repeats, because it has fewer than another, is
    not written.

    Args:
        write_interval: ``"batch"``: after each batch, so memory does not grow; ``"epoch"``: at the
            end, with all outputs of this rank; or ``"batch_and_epoch"``.

    Raises:
        UsageError: another ``write_interval``, or its method is not overridden.

    Source: ``BasePredictionWriter`` of PyTorch Lightning.
    """

    def __init__(
        self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"
    ) -> None:
        name = type(self).__name__
        if write_interval not in _INTERVALS:
            hint = f"Fix: {', '.join(map(repr, _INTERVALS))}"
            raise UsageError(f"{name}: write_interval={write_interval!r}. {hint}")
        self.on_batch, self.on_epoch = "batch" in write_interval, "epoch" in write_interval
        for wanted, method in (
            (self.on_batch, "write_on_batch_end"),
            (self.on_epoch, "write_on_epoch_end"),
        ):
            if wanted and getattr(type(self), method) is getattr(BasePredictionWriter, method):
                message = f"{name}: write_interval={write_interval!r} needs {method}"
                raise UsageError(f"{message}. Fix: override it")
        #: For each loader the indices of batches that its sampler gave and that were not predicted.
        self._coming: list[deque[Any] | None] = []
        self._outputs: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch's output.

        Args:
            prediction: the result of ``predict_step``, on the device.
            batch_indices: the indices of the batch's samples in the dataset; ``None`` if the
                loader has no batch sampler, as that of an IterableDataset.
        """

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Module, predictions: Any, batch_indices: Any
    ) -> None:
        """Write all outputs of this rank.

        Args:
            predictions: one output a batch, on the CPU; a list of such lists if there are several
                loaders.
            batch_indices: the indices of each batch, nested in the same way.
        """

    def as_plugin(self) -> Adapter:
        """Return the plugin that calls this callback."""
        return _WriterAdapter(self)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._outputs = [[] for _ in self._coming]
        self._indices = [[] for _ in self._coming]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._geartrain_run is not None
        if self._geartrain_run.repeating or not self._writes():
            return
        coming = self._coming[dataloader_idx]
        indices = None if coming is None else coming.popleft()
        if self.on_batch:
            self.write_on_batch_end(
                trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx
            )
        if self.on_epoch:
            self._outputs[dataloader_idx].append(map_tensors(outputs, torch.Tensor.cpu))
            self._indices[dataloader_idx].append(indices)

    def _writes(self) -> bool:
        """True on the first of the ranks that have one model together, which see the same data."""
        assert self._geartrain_run is not None
        world = self._geartrain_run.world
        return world.rank % (world.size // world.data_size) == 0

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self.on_epoch and self._writes():
            is_single = len(self._outputs) == 1
            outputs = self._outputs[0] if is_single else self._outputs
            self.write_on_epoch_end(
                trainer, pl_module, outputs, self._indices[0] if is_single else self._indices
            )
        self._outputs, self._indices = [], []


class PredictionWriter(BasePredictionWriter):
    """Write predictions to ``.pt`` files, which ``torch.load(FILE, weights_only=True)`` reads.

    After each batch, ``DIR/rank-R/loader-L/batch-000000.pt`` with ``{"prediction": ...,
    "indices": [...]}``; with ``write_interval="epoch"`` one file ``DIR/rank-R.pt`` with
    ``{"predictions": ..., "indices": ...}``. ``prediction`` holds tensors on the CPU.

    Args:
        output_dir: the folder; a rank's files of an earlier run are never replaced.
        write_interval: as for :class:`BasePredictionWriter`.

    Raises:
        TrainingError: the folder has files of an earlier run, or cannot be written.
    """

    def __init__(
        self,
        output_dir: str | Path,
        write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch",
    ) -> None:
        super().__init__(write_interval)
        self.output_dir = user_path(output_dir, "prediction_writer: output_dir").absolute()

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        super().on_predict_start(trainer, pl_module)
        for found in (self._folder(trainer), self._file(trainer)):
            if found.exists():
                raise TrainingError(
                    f"geartrain-callbacks[prediction_writer]: {found} exists, and predictions are "
                    "never replaced. Fix: use another output_dir, or remove it"
                )

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        path = self._folder(trainer) / f"loader-{dataloader_idx}" / f"batch-{batch_idx:06}.pt"
        prediction = map_tensors(prediction, _compact)
        _write(path, {"prediction": prediction, "indices": batch_indices})

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Module, predictions: Any, batch_indices: Any
    ) -> None:
        predictions = map_tensors(predictions, _compact)
        _write(self._file(trainer), {"predictions": predictions, "indices": batch_indices})

    def _folder(self, trainer: Trainer) -> Path:
        return self.output_dir / f"rank-{trainer.global_rank}"

    def _file(self, trainer: Trainer) -> Path:
        return self.output_dir / f"rank-{trainer.global_rank}.pt"


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU without the rest of the storage of which it may be a view."""
    return tensor.detach().cpu().clone()


def _write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        torch.save(content, file)


class _WriterAdapter(Adapter):
    """The plugin of a writer: it also records which samples a batch has."""

    callback: BasePredictionWriter
    #: ``geartrain predict`` then needs no folder for predictions.pt.
    writes_predictions = True

    @hookimpl(wrapper=True)
    def shard_dataloader(self, run: Run, stage: str) -> Generator[None, Any, Any]:
        outputs = yield
        if stage != "predict":
            return outputs
        batches = getattr(outputs, "batch_sampler", None)
        if not isinstance(outputs, DataLoader) or batches is None:
            self.callback._coming.append(None)
            return outputs
        coming: deque[Any] = deque()
        self.callback._coming.append(coming)
        return with_samplers(outputs, outputs.sampler, _recorded(batches, coming))

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.command == "predict" and run.trainer.return_predictions is None:
            run.trainer.return_predictions = False

    @hookimpl(wrapper=True)
    def setup_process_group(self) -> Generator[None, Any, Any]:
        self.callback._coming = []
        return (yield)


def _recorded(batches: Any, coming: deque[Any]) -> Any:
    """Return a copy of a batch sampler that notes the indices that it gives.

    It stays an object of its class, because the prediction of several ranks depends on the class.
    """

    class Recording(type(batches)):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return _noting(super().__iter__(), coming)

    try:
        same = copy.copy(batches)
        same.__class__ = Recording
    except TypeError:  # a list of batches, or a class with slots
        return _Batches(batches, coming)
    return same


def _noting(batches: Iterator[Any], coming: deque[Any]) -> Iterator[Any]:
    coming.clear()
    for indices in batches:
        coming.append(list(indices))
        yield indices


class _Batches:
    """A batch sampler whose class cannot be extended, with its indices noted."""

    def __init__(self, batches: Iterable[Any], coming: deque[Any]) -> None:
        self._batches, self._coming = batches, coming

    def __iter__(self) -> Iterator[Any]:
        return _noting(iter(self._batches), self._coming)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
