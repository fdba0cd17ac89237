"""``geartrain tune lr TARGET`` and ``geartrain tune batch-size TARGET``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from geartrain import Trainer, TrainingError, UsageError
from geartrain.plugin_api import check_module, nearest, replacing
from geartrain_cli.arguments import Request, read_arguments
from geartrain_cli.folders import RunFolders
from geartrain_cli.tables import Group, show, show_text
from geartrain_cli.target import Target
from geartrain_tools.tuner import LRFinder, Tuner
from geartrain_tools.tuner.tuner import learning_rate_of, owners_of

#: The tuned quantity -> option -> (type, default, help).
_OPTIONS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "lr": {
        "min_lr": (float, 1e-8, "the first learning rate"),
        "max_lr": (float, 1.0, "the last learning rate"),
        "num_training": (int, 100, "optimizer steps to train"),
        "mode": (Literal["exponential", "linear"], "exponential", "how the learning rate grows"),
        "early_stop_threshold": (
            float | None,
            4.0,
            "end if the averaged loss is above this many times its best; null for never",
        ),
        "json": (bool, False, "print the result as JSON"),
    },
    "batch-size": {
        "mode": (
            Literal["power", "binsearch"],
            "power",
            "double until a batch does not run; binsearch then bisects between the last two",
        ),
        "init_val": (int, 2, "the batch size to begin with"),
        "max_trials": (int, 25, "the most batch sizes to try"),
        "steps_per_trial": (int, 3, "optimizer steps of each trial"),
        "batch_arg_name": (
            str,
            "batch_size",
            "the attribute of the data module or the module that train_dataloader reads",
        ),
        "json": (bool, False, "print the result as JSON"),
    },
}

_EXAMPLES = (
    "geartrain tune lr train.py",
    "geartrain tune batch-size train.py --mode binsearch",
)
_TUNED = (
    (
        "lr TARGET",
        "trains a few steps with a growing learning rate and suggests the one at which the loss "
        "falls fastest",
    ),
    (
        "batch-size TARGET",
        "tries larger and larger batches and prints the largest that fits in memory",
    ),
)
_USAGE = (
    "Both write nothing, except their result if --output DIR is given. "
    "geartrain tune lr TARGET --help lists the options."
)


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Find a learning rate or a batch size, and print the option that uses it.

    Raises:
        TrainingError: nothing was found.
    """
    if argv[:1] in (["-h"], ["--help"], ["--help-all"]):
        examples = Group("examples", [(example,) for example in _EXAMPLES])
        show_text("usage: geartrain tune lr|batch-size TARGET [options]")
        print()
        show([examples, Group("what to tune", _TUNED)])
        print()
        show_text(_USAGE)
        raise SystemExit(0)
    if not argv or argv[0] not in _FINDERS:
        given = (
            f"there is no {argv[0]!r} to tune. {nearest(argv[0], _FINDERS)}"
            if argv
            else "the first argument must be lr or batch-size."
        )
        raise UsageError(
            f"{given} Fix: geartrain tune lr TARGET, or geartrain tune batch-size TARGET"
        )
    label, folders = f"{name} {argv[0]}", RunFolders()
    try:
        choose = partial(folders.choose, name)
        request = read_arguments(label, argv[1:], target, defaults, _OPTIONS[argv[0]], choose)
        check_module(request.target[0], "fit")
        _FINDERS[argv[0]](request)
    finally:
        folders.close()
    return request.trainer


def _lr(request: Request) -> None:
    values, trainer = request.values, request.trainer
    files = _files(trainer, "lr.json", "lr.csv")
    model, data = request.make_model()
    given = {
        name: values[name]
        for name in (
            "min_lr",
            "max_lr",
            "num_training",
            "mode",
            "early_stop_threshold",
            "checkpoint",
        )
    }
    found = Tuner(trainer).lr_find(model, datamodule=data, update_attr=False, **given)
    suggestion = found.suggestion()
    if trainer.is_global_zero:
        _write_lr(files, found)
        if values.json:
            print(json.dumps(found.as_dict(), indent=2))
        elif suggestion is not None:
            print(
                f"learning rate: {suggestion:.3g}, at which the loss fell fastest "
                f"in {len(found.lrs)} steps"
            )
            if found.stopped:
                print(f"ended early: {found.stopped}")
            if found.doubt():
                print(f"do not trust it: {found.doubt()}")
            use = "to use it nevertheless" if found.doubt() else "use it"
            print(f"\n{found.plot()}\n\n{use}: {_lr_option(model, suggestion)}")
    if suggestion is None:
        raise TrainingError(f"no learning rate is suggested: {found.why_not()}")


def _lr_option(model: Any, suggestion: float) -> str:
    try:
        name = learning_rate_of(model, "")
    except UsageError:
        name = ""
    if name in model.hparams:
        return f"--model.{name} {suggestion:.3g}"
    return (
        f"lr={suggestion:.3g} in configure_optimizers; "
        "the module's __init__ has no lr or learning_rate"
    )


def _write_lr(files: list[Path], found: LRFinder) -> None:
    if files:
        _write(files[0], f"{json.dumps(found.as_dict(), indent=2)}\n")
        table = io.StringIO()
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["lr", "loss", "raw_loss"])
        rows.writerows(zip(found.lrs, found.losses, found.raw_losses, strict=True))
        _write(files[1], table.getvalue())


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def _batch_size(request: Request) -> None:
    values, trainer = request.values, request.trainer
    files = _files(trainer, "batch_size.json")
    model, data = request.make_model()
    tuner = Tuner(trainer)
    given = {
        name: values[name]
        for name in (
            "mode",
            "init_val",
            "max_trials",
            "steps_per_trial",
            "batch_arg_name",
            "checkpoint",
        )
    }
    found = tuner.scale_batch_size(model, datamodule=data, **given)
    trials = [
        {
            "batch_size": trial.batch_size,
            "samples_per_second": trial.samples_per_second,
            "error": trial.error,
        }
        for trial in tuner.trials
    ]
    facts = {"batch_size": found, "reason": tuner.reason, "trials": trials}
    for file in files:
        _write(file, f"{json.dumps(facts, indent=2)}\n")
    if values.json:
        print(json.dumps(facts, indent=2))
        return
    table = Table("batch size", "samples/s", "ran out of memory")
    for trial in tuner.trials:
        speed = "" if trial.samples_per_second is None else f"{trial.samples_per_second:.1f}"
        table.add_row(str(trial.batch_size), speed, trial.error)
    Console(markup=False).print(table)
    name = values.batch_arg_name
    kind = next((kind for kind, owner in owners_of(model, data) if name in owner.hparams), None)
    print(f"batch size: {found} on one device; {tuner.reason}")
    print(f"use it: --{kind}.{name} {found}" if kind else f"use it: {name} = {found}")
    print("The learning rate belongs to a batch size: look for it again, with geartrain tune lr.")


def _files(trainer: Trainer, *names: str) -> list[Path]:
    """Return the files that ``--output DIR`` will contain; none without that option.

    Raises:
        UsageError: one of them exists.
    """
    if trainer.output is None:
        return []
    files = [trainer.output / name for name in names]
    for file in files:
        if trainer.is_global_zero and file.exists():
            raise UsageError(
                f"{str(file)!r} exists, and nothing is overwritten. "
                "Fix: use another --output, or remove it"
            )
    return files


_FINDERS: dict[str, Callable[[Request], None]] = {"lr": _lr, "batch-size": _batch_size}
