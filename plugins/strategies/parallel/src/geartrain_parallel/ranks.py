"""The common work of a run's ranks, on top of the collectives of its hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from geartrain import Run, TrainingError
from geartrain.plugin_api import (
    LocalMetric,
    MetricOptions,
    RankCoordinator,
    Stage,
    libraries,
    map_tensors,
    warn,
)
from geartrain_parallel import agreement, gathering, metrics as metrics_of_ranks, predictions
from geartrain_parallel.collectives import of_data_ranks
from geartrain_parallel.uneven_inputs import (
    is_sure,
    repeated,
    until_all_ranks_are_done,
    until_first_rank_is_done,
)


class SeveralRanks(RankCoordinator):
    """A rank among others; needs the strategy's ``log_sync``, ``all_gather`` and ``broadcast``."""

    def check(self, run: Run, checkpoint: str | None = None) -> None:
        # A module's arguments may differ, for example a folder's name; its parameters must not.
        rank_specific = {"passed_over", "hyperparameters"}
        # A launcher's decisions may differ between nodes, and between earlier and later ranks.
        if run.plan.processes is None:
            rank_specific |= {"devices", "nodes"}
        plan = {key: value for key, value in run.plan.as_dict().items() if key not in rank_specific}
        # Ranks with different parameters would hang, or average gradients of different parameters.
        parameters = {
            name: [*p.shape, p.requires_grad] for name, p in run.module.named_parameters()
        }
        settings = {
            "the plan": plan,
            "the command": run.command,
            "the checkpoint": checkpoint,
            # Nodes may have different folders. A rank without one would not save with the others.
            "--output": "no folder" if run.output is None else "a folder",
            "return_predictions": getattr(run.trainer, "return_predictions", None),
            "parameters": parameters,
            "buffers": {name: [*buffer.shape] for name, buffer in run.module.named_buffers()},
        }
        first, folder = run.hooks.broadcast(run=run, obj=(settings, run.output), src=0)
        differences = [
            f"{message}: {_first_difference(first[message], settings[message])}"
            for message in settings
            if first[message] != settings[message]
        ]
        if run.trainer.takes_folder_of_rank_0 and None not in (folder, run.output):
            if checkpoint is not None and folder != run.output:
                differences.append(f"the run to resume: {folder}, {run.output}")
            _set_folder(run, folder)
        table = run.hooks.log_sync(
            run=run, values=torch.tensor([len(differences)], dtype=torch.float64)
        )
        if table.any():
            raise TrainingError(
                f"rank {run.world.rank} differs from rank 0 in {'; '.join(differences)}"
                if differences
                else f"rank {int(table[:, 0].nonzero()[0])} differs from rank 0; see its log"
            )

    def check_loaders(self, run: Run, stage: str, count: int) -> None:
        local = torch.tensor([count], dtype=torch.float64)
        counts = [int(n) for n in run.hooks.log_sync(run=run, values=local)[:, 0]]
        if len(set(counts)) > 1:
            raise TrainingError(
                f"{stage}: the ranks have {counts} loaders, rank by rank. "
                "Fix: return the same loaders on every rank; geartrain shards them"
            )

    def count_batches(self, run: Run, name: str, stage: Stage) -> Stage:
        """Find the largest number of batches of each loader over all ranks.

        Raises:
            TrainingError: training loaders have different lengths; longer ranks would hang.
        """
        if not stage.loaders:
            return stage
        numbers = [
            all(map(is_sure, stage.loaders)),
            *(-1 if n is None else n for n in stage.batches),
        ]
        table = run.hooks.log_sync(run=run, values=torch.tensor(numbers, dtype=torch.float64))
        lengths_unknown = not table[:, 0].all()
        if name == "train" and not lengths_unknown and bool((table != table[0]).any()):
            raise TrainingError(
                "the ranks' training loaders have different lengths: "
                f"{[int(n) for n in table[:, 1]]} batches, rank by rank. Fix: give every rank the "
                "same data, which geartrain shards, or make the shards equally long"
            )
        most = [None if int(column.min()) < 0 else int(column.max()) for column in table[:, 1:].T]
        return replace(stage, max_batches=most, lengths_unknown=lengths_unknown)

    def batches(self, run: Run, batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
        stage = run.current_stage
        if run.stage == "train":
            batches = islice(batches, limit)
            return until_first_rank_is_done(run, batches) if stage.lengths_unknown else batches
        if stage.lengths_unknown:
            return _marked(run, until_all_ranks_are_done(run, batches, limit))
        most, sanity = stage.max_batches[run.dataloader_idx], run.plan.options.num_sanity_val_steps
        if run.stage == "sanity_check" and sanity != -1 and most is not None:
            most = min(most, sanity)
        return _marked(run, repeated(batches, limit, most))

    def total_weight(self, run: Run, weight: Any) -> Any:
        local = [0.0, 0.0] if weight is None else [1.0, float(weight)]
        table = run.hooks.log_sync(run=run, values=torch.tensor(local, dtype=torch.float64))
        has, total = table[:, 0], table[:, 1]
        if has.any() and not has.all():
            raise TrainingError(
                f"the losses of ranks {has.nonzero().flatten().tolist()} have weights, and those "
                "of the other ranks have none. Fix: return 'weight' on every rank, or on none"
            )
        bad = ~(total.isfinite() & (total >= 0))
        if bad.any():
            raise TrainingError(
                f"the weights of rank {int(bad.nonzero()[0])} are negative, infinite or NaN. "
                "Fix: return the number of samples or tokens that the loss sums"
            )
        return None if weight is None else float(of_data_ranks(run, total).sum())

    def mean_loss(self, run: Run, loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor | float):
            return loss
        value = torch.as_tensor(loss, device=run.device).detach()
        return torch.stack(list(run.hooks.all_gather(run=run, tensor=value))).mean()

    def end_epoch(self, run: Run) -> None:
        raise TrainingError(
            f"on_train_batch_start returned -1 on rank {run.world.rank}: the other ranks would "
            "hang, waiting for its gradients. Fix: self.trainer.should_stop = True, or "
            "limit_train_batches"
        )

    def broadcast_buffers(self, run: Run) -> None:
        # Also without buffers: a module may register them on some ranks only.
        buffers, local = dict(run.module.named_buffers()), None
        if run.world.rank == 0:
            local = {name: buffer.cpu() for name, buffer in buffers.items()}
        first = run.hooks.broadcast(run=run, obj=local, src=0)
        for name in first.keys() & buffers.keys():
            buffers[name].copy_(first[name])

    def check_agreement(self, run: Run, begins: bool = False) -> None:
        agreement.check(run, begins)

    def outputs(self, run: Run, mine: list[Any], loader: Any) -> list[Any]:
        return predictions.from_all_ranks(run, mine, loader)

    def gather_states(self, run: Run, mine: dict[str, Any]) -> list[dict[str, Any]]:
        ranks, step = [mine], run.world.size // run.world.data_size
        for rank in range(step, run.world.size, step):  # one at a time, to use less memory
            received = run.hooks.broadcast(
                run=run, obj=mine if run.world.rank == rank else None, src=rank
            )
            if run.world.rank == 0:
                ranks.append(received)
        return ranks

    def gather(self, run: Run, data: Any, sync_grads: bool = False) -> Any:
        tensors: list[torch.Tensor] = []
        map_tensors(data, tensors.append, run.device)
        gathered = iter(gathering.gather(run, tensors, sync_grads))
        return map_tensors(data, lambda _: next(gathered), run.device)

    def reduce(
        self, run: Run, metrics: Mapping[str, LocalMetric]
    ) -> tuple[dict[str, float], dict[str, MetricOptions], bool]:
        return metrics_of_ranks.sync(run, metrics)


def _set_folder(run: Run, folder: Path) -> None:
    run.output, run.plan = folder, replace(run.plan, output=folder)
    run.trainer.plan = run.plan
    for part in run.hooks.parts:
        if part.info.is_core and part.info.name == "folder":
            part.plugin.path = folder


def _marked(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[Any]:
    """Yield batches; for a repeated one, set ``run.repeating`` and discard its logs and metrics.

    What the module itself collects is the user's: warn once if a list of it has grown.
    """
    warned = False
    for batch, again in batches:
        before = _lengths_of_lists(run.module) if again and not warned else {}
        with _thrown_away(run) if again else nullcontext():
            yield batch
        after = _lengths_of_lists(run.module) if before else {}
        if name := next((name for name in after if after[name] > before.get(name, 0)), None):
            warned = True
            warn(
                f"rank {run.world.rank} has fewer batches than others and repeated one, and the "
                f"step added to self.{name}. Fix: add nothing if self.trainer.run.repeating"
            )


def _lengths_of_lists(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}


@contextmanager
def _thrown_away(run: Run) -> Iterator[None]:
    """Discard logged values and updates of other libraries' metrics."""
    run.repeating = True
    try:
        with run.logs.scope(keep=False), ExitStack() as stack:
            for library in libraries().values():
                stack.enter_context(library.temporary_copies(run.module))
            yield
    finally:
        run.repeating = False


def _first_difference(first: Any, mine: Any) -> str:
    if isinstance(first, dict) and isinstance(mine, dict):
        keys = [key for key in {**first, **mine} if first.get(key) != mine.get(key)]
        return ", ".join(
            f"{key} is {first.get(key)!r} there and {mine.get(key)!r} here" for key in keys[:3]
        )
    return f"{first!r} there and {mine!r} here"
