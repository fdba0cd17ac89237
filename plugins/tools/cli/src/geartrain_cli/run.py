"""``geartrain fit|validate|test|predict TARGET``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from geartrain import Module, Trainer, UsageError
from geartrain.plugin_api import check_module
from geartrain_cli.arguments import Request, read_arguments
from geartrain_cli.folders import RunFolders
from geartrain_cli.json_output import errors_as_json, print_result, printed_on_stderr
from geartrain_cli.predictions import save_predictions
from geartrain_cli.target import Target

#: Options of these commands alone -> (type, default, help).
_OPTIONS = {"json": (bool, False, "print the result, or the error, as one JSON object")}


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Trainer:
    """Make trainer, module and data from the options, and run one of the trainer's methods.

    ``predict`` writes predictions.pt, unless a callback writes the predictions.
    """
    if "--json" not in argv:  # read here: the target may print when it is imported
        return _run(name, argv, target, defaults)
    with errors_as_json(name):
        with printed_on_stderr() as stdout:
            trainer = _run(name, argv, target, defaults, stdout)
        if trainer.is_global_zero:
            print_result(name, trainer)
    return trainer


def _run(
    name: str,
    argv: list[str],
    target: Target | None,
    defaults: Mapping[str, Any] | None,
    stdout: int | None = None,
) -> Trainer:
    folders = RunFolders()

    def choose(values: Namespace, model: type[Module]) -> None:
        for option, value in _options_of_attempt().items() if name == "fit" else ():
            values[option] = value
            if option == "resume":
                values.checkpoint = None
        folders.choose(name, values, model)

    try:
        request = read_arguments(name, argv, target, defaults, _OPTIONS, choose)
        request.trainer.takes_folder_of_rank_0 = folders.is_numbered
        return _run_request(name, argv, target, request, stdout)
    finally:
        folders.close()


def _run_request(
    name: str, argv: list[str], target: Target | None, request: Request, stdout: int | None
) -> Trainer:
    check_module(request.target[0], name)
    trainer = request.trainer
    plugins = [part.plugin for part in trainer.hooks.parts]
    for plugin in plugins:
        if hasattr(plugin, "output_option"):  # the progress bar names the option
            plugin.output_option = "--output DIR"
    writes = any(getattr(plugin, "writes_predictions", False) for plugin in plugins)
    needs_folder = not writes and not trainer.plan.options.fast_dev_run
    if name == "predict" and trainer.output is None and needs_folder:
        raise UsageError("predict writes predictions.pt into a folder. Fix: --output DIR")
    values, files = request.values, {"ckpt_path": request.values.checkpoint}
    if name == "fit":
        files = {"checkpoint": values.checkpoint, "ckpt_path": values.resume}
        trainer.checkpoint_file(values.resume, resumes=True)
    # The run repeats this check with the module, which does not exist yet.
    trainer.check(request.target[0], name, resumes=name == "fit" and values.resume is not None)
    for plugin in plugins:
        if name == "fit" and hasattr(plugin, "run_command"):  # it supervises another process
            code = plugin.run_command(trainer.plan, plugins, stdout)
            if code is not None:
                raise SystemExit(code)
    model, data = request.make_model()
    try:
        result = getattr(trainer, name)(model, datamodule=data, **files)
    except KeyboardInterrupt:
        if trainer.is_global_zero and (path := trainer.resume_file()):
            print(f"Resume: {_resuming(name, argv, target, path)}", file=sys.stderr)
        raise
    if result is not None and name == "predict" and trainer.output and trainer.is_global_zero:
        save_predictions(result, trainer.output / "predictions.pt")
    return trainer


def _options_of_attempt() -> dict[str, str]:
    """Return the options that a supervisor of this command gives in place of those typed.

    A program that the run starts inherits the variable, and has other arguments.
    """
    attempt = json.loads(os.environ.get("GEARTRAIN_ATTEMPT", "{}"))
    options: dict[str, str] = attempt.get("options", {})
    return options if attempt.get("argv") == sys.orig_argv[1:] else {}


def _resuming(name: str, argv: list[str], target: Target | None, path: Path) -> str:
    """Return the command line that resumes this ``fit``, as a shell reads it."""
    kept: list[str] = []
    skips = False  # the value of the option before
    for argument in argv:
        option, has_value, _ = argument.partition("=")
        starts = option in ("--resume", "--checkpoint")
        if not starts and not (skips and not argument.startswith("--")):
            kept.append(argument)
        skips = starts and not has_value
    program = ["geartrain", name] if target is None else ["python", sys.argv[0], name]
    return shlex.join([*program, *kept, "--resume", os.path.relpath(path)])
