"""Run a plugin in the process of its test, on several ranks, and return each rank's result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from geartrain import Module, Trainer, UsageError, hookimpl
from geartrain.plugin_api import DataSource
from geartrain_testing.nets import Net, samples
from geartrain_testing.thread_ranks import ThreadRanks

#: command -> the stage of its loaders.
_STAGES = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}
#: Samples in one rank's batch of the default data.
_BATCH = 2


@dataclass(frozen=True, eq=False)
class RankResult:
    """The result of one rank of :func:`run_plugin`."""

    rank: int
    #: This rank's plugins, in the order given.
    plugins: list[Any]
    module: Module
    trainer: Trainer
    #: The metrics that loggers received, by step; empty on all ranks but rank 0.
    logged: dict[int, dict[str, float]]
    #: The command's return value; ``None`` for ``fit``.
    result: Any
    #: The rank's exception; ``None`` if it raised none.
    error: BaseException | None

    @property
    def plugin(self) -> Any:
        """This rank's first plugin."""
        return self.plugins[0]

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric on this rank."""
        return self.trainer.run.metrics


class _Logged:
    """A logger that keeps metrics by step."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    @hookimpl
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)


def run_plugin(
    plugin: Any = (),
    *,
    ranks: int = 2,
    first: int = 0,
    command: str = "fit",
    module: Module | None = None,
    data: Any = None,
    val_data: Any = None,
    check: bool = True,
    ckpt_path: Any = None,
    **options: Any,
) -> list[RankResult]:
    """Train or evaluate a small module with a plugin, on ranks that are threads of this process.

    Args:
        plugin: a plugin as ``Trainer(plugins=...)`` or ``Trainer(callbacks=...)`` takes it: an
            object, a class, a name, a file, or a list of these.
        ranks: the number of ranks.
        first: the rank that runs first; see :class:`ThreadRanks`.
        command: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        module: default: a regression that logs ``loss``, ``val_loss`` and ``test_loss``.
        data: loaders or a DataModule for the command; default: the module's loaders, otherwise 8
            batches of samples ``(x, y, number)``.
        val_data: loaders to validate in ``fit``; default: as for ``data``.
        check: ``True`` raises the first error; with ``False`` each result has its rank's error.
        ckpt_path: passed to the Trainer's command.
        options: options of the Trainer. By default it trains one epoch, logs every step, shows no
            progress bar, and skips the sanity check.

    Returns:
        One result per rank, by rank. Rank 0 has the objects that were passed; other ranks have
        copies.

    Raises:
        UsageError: wrong usage; raised before anything starts, also with ``check=False``.
        BaseException: the first error of a rank, with a note that names the rank.
    """
    if command not in _STAGES:
        raise UsageError(f"command={command!r} must be one of {', '.join(map(repr, _STAGES))}.")
    if "devices" in options:
        raise UsageError(
            f"run_plugin makes {ranks} ranks, and devices={options['devices']!r} would do nothing. "
            "Fix: pass ranks= instead"
        )
    if "strategy" in options:
        raise UsageError(
            "run_plugin always uses the strategy ThreadRanks. "
            "Fix: use a Trainer, or test a strategy with the conformance kit"
        )
    given, logged = _as_list(plugin), _Logged()
    callbacks = [one for one in given if hasattr(one, "as_plugin")]
    plugins = [one for one in given if not hasattr(one, "as_plugin")]
    strategy = ThreadRanks(ranks, first)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    all_plugins = [*plugins, *_as_list(options.pop("plugins", ())), logged]
    all_callbacks = [*callbacks, *_as_list(options.pop("callbacks", ()))]
    trainer = Trainer(
        **{**quiet, **options}, strategy=strategy, plugins=all_plugins, callbacks=all_callbacks
    )
    module = Net() if module is None else module
    loaders = [_loader(module, _STAGES[command], data, ranks)]
    if command == "fit":
        loaders.append(_loader(module, "validate", val_data, ranks))
    try:
        getattr(trainer, command)(module, *loaders, ckpt_path=ckpt_path)
    except BaseException:
        if check or not any(strategy.errors):
            raise
    found = []
    for rank, (run, error) in enumerate(zip(strategy.runs, strategy.errors, strict=True)):
        # Plugins come before callbacks.
        chosen = [part.plugin for part in run.trainer.setup.parts if part.info.kind == "plugin"]
        as_plugins, as_callbacks = iter(chosen), iter(chosen[len(all_plugins) :])
        found_parts = [
            next(as_callbacks if hasattr(one, "as_plugin") else as_plugins) for one in given
        ]
        own = [getattr(plugin, "callback", plugin) for plugin in found_parts]
        metrics = chosen[len(all_plugins) - 1].metrics
        result = strategy.results[rank]
        if command in ("validate", "test") and result is not None:
            result = run.trainer._per_loader(command, result)
        found.append(RankResult(rank, own, run.module, run.trainer, metrics, result, error))
    return found


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _loader(module: Module, stage: str, given: Any, ranks: int) -> Any:
    """Return the given loaders, ``None`` if the module has or needs none, else the default data."""
    has_own = callable(getattr(module, DataSource.method(stage), None))
    needless = stage == "validate" and not hasattr(module, "validation_step")
    if given is not None or has_own or needless:
        return given
    return DataLoader(samples(4 * _BATCH * ranks), _BATCH)
