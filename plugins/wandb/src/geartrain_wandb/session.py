"""wandb itself: imported late, checked early, begun online or else offline, and ended so that no process stays."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geartrain import UsageError

if TYPE_CHECKING:
    import wandb

LABEL = "geartrain-wandb[wandb]"
#: Seconds, unless the environment sets them: wandb's own are 90 and no end. The rest of an upload can be sent by ``wandb sync``.
_PATIENCE = {"init_timeout": 30.0, "finish_timeout": 300.0}

#: True if wandb was first imported here: then no other code uses its service process.
_alone = False
#: A run that could not be ended, because its service process is gone: wandb still calls it the current one.
_dead: Any = None


def load() -> ModuleType:
    """wandb, imported on first use: that takes half a second."""
    global _alone
    _alone = _alone or "wandb" not in sys.modules
    import wandb

    return wandb


def existing() -> wandb.Run | None:
    """The run that the script began itself, if there is one."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is _dead else run


def check(settings: Mapping[str, Any]) -> None:
    """Check that a run with these settings could begin. Start no process, prompt for nothing and change nothing.

    Raises:
        UsageError: wandb is not installed or refuses a setting, or the run would be online and no user is logged in.
    """
    # A folder called wandb, such as wandb itself writes, can be imported too: such a package has no origin.
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UsageError(f"{LABEL}: the package wandb is not installed. Fix: pip install wandb")
    wandb = load()
    try:
        wandb.Settings(**settings)
    except Exception as error:  # pydantic's ValidationError, or wandb's own UsageError
        raise UsageError(f"{LABEL}: wandb refuses it: {_said(error)}") from error
    if not _logged_in(settings.get("mode")):
        raise UsageError(
            f"{LABEL}: nobody is logged in, and wandb would ask for a key. Fix: `wandb login` (or WANDB_API_KEY), "
            "or keep the run on this machine: --wandb.mode offline"
        )


def _said(error: Exception) -> str:
    """The error in one line; pydantic's has an address of its manual below each."""
    errors = error.errors() if hasattr(error, "errors") else []
    return "; ".join(
        f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in errors
    ) or str(error)


def _logged_in(mode: str | None) -> bool:
    """True if wandb would find a key, or needs none; as ``wandb.init`` looks for it, but without its prompt."""
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth

        settings = wandb_setup.singleton().settings
        if (mode or settings.mode) not in ("online", "shared"):
            return True
        found = wbauth.authenticate_session(
            host=settings.base_url, source=LABEL, prompt=False, update_session=False
        )
    except (
        ImportError,
        AttributeError,
        TypeError,
    ):  # another wandb than this was written for: its init will report it
        return True
    except Exception as error:
        raise UsageError(f"{LABEL}: {_said(error)}") from error
    finally:
        release()  # what wandb read of the environment must not hold for the runs that come
    return found is not None


def begin(settings: Mapping[str, Any], **arguments: Any) -> wandb.Run:
    """Call ``wandb.init``; if its server does not answer, make an offline run.

    Args:
        settings: for ``wandb.Settings``.
        arguments: for ``wandb.init``.
    """
    module = load()
    patience = {
        name: seconds
        for name, seconds in _PATIENCE.items()
        if f"WANDB_{name.upper()}" not in os.environ
    }
    try:
        run: wandb.Run = module.init(settings=module.Settings(**patience, **settings), **arguments)
    except module.errors.CommError as error:
        run = module.init(
            settings=module.Settings(**{**patience, **settings, "mode": "offline"}), **arguments
        )
        folder, said = (
            os.path.dirname(run.dir),
            str(error).partition("\n")[0],
        )  # below it: wandb's advice on its own timeouts
        warnings.warn(
            f"wandb: its server does not answer, and the run is kept on this machine. Send it later: wandb sync {folder} ({said})",
            stacklevel=2,
        )
    return run


def end(run: wandb.Run, exit_code: int) -> None:
    """``run.finish``, and the end of wandb's service process."""
    global _dead
    try:
        run.finish(exit_code=exit_code)
    except Exception:
        _dead = run
        _tear_down()  # wandb would answer the next init with this run
        raise
    release()


def release() -> None:
    """End wandb's service process, where only this plugin uses it; otherwise it ends with the program."""
    if _alone and existing() is None:
        _tear_down()


def _tear_down() -> None:
    # SystemExit: with the service's own exit code, if that is not 0.
    with suppress(Exception, SystemExit):
        load().teardown()
