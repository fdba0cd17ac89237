"""Control of wandb: import, check, start (online or else offline), and stop its process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geartrain import UsageError
from geartrain.plugin_api import warn

if TYPE_CHECKING:
    import wandb

LABEL = "geartrain-wandb[wandb]"
#: Seconds, unless the environment sets them. wandb's own limits are 90 s and none. ``wandb sync``
#: can send the rest of an upload.
_PATIENCE = {"init_timeout": 30.0, "finish_timeout": 300.0}

#: True if wandb was first imported here, so that no other code uses its service process.
_alone = False
#: A run that could not be ended because its service process is dead; for wandb it is still current.
_dead: Any = None


def load() -> ModuleType:
    """Return wandb. The first import takes half a second."""
    global _alone
    _alone = _alone or "wandb" not in sys.modules
    import wandb

    return wandb


def existing() -> wandb.Run | None:
    """Return the run that the script itself started, if any."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is _dead else run


def check(settings: Mapping[str, Any]) -> None:
    """Check that a run with these settings can start. Start no process and change nothing.

    Raises:
        UsageError: wandb is not installed or refuses a setting, or an online run needs a login.
    """
    # wandb itself writes a folder named wandb. It can be imported, but has no origin.
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UsageError(f"{LABEL}: the package wandb is not installed. Fix: pip install wandb")
    wandb = load()
    try:
        wandb.Settings(**settings)
    except Exception as error:  # pydantic's ValidationError or wandb's UsageError
        raise UsageError(f"{LABEL}: wandb refuses it: {_said(error)}") from error
    if not _logged_in(settings.get("mode")):
        raise UsageError(
            f"{LABEL}: you are not logged in, and wandb would ask for a key. "
            "Fix: `wandb login` (or WANDB_API_KEY), "
            "or keep the run on this machine: --wandb.mode offline"
        )


def _said(error: Exception) -> str:
    """Return the error in one line, without the links of pydantic."""
    errors = error.errors() if hasattr(error, "errors") else []
    return "; ".join(
        f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in errors
    ) or str(error)


def _logged_in(mode: str | None) -> bool:
    """True if wandb finds a key or needs none. Like ``wandb.init``, but without its prompt."""
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth

        settings = wandb_setup.singleton().settings
        if (mode or settings.mode) not in ("online", "shared"):
            return True
        found = wbauth.authenticate_session(
            host=settings.base_url, source=LABEL, prompt=False, update_session=False
        )
    except (ImportError, AttributeError, TypeError):
        # An unknown version of wandb: its init will report the error.
        return True
    except Exception as error:
        raise UsageError(f"{LABEL}: {_said(error)}") from error
    finally:
        release()  # settings that wandb read from the environment must not affect later runs
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
        # The lines below the first are wandb's advice on its own timeouts.
        folder, text = os.path.dirname(run.dir), str(error).partition("\n")[0]
        warn(
            "wandb: its server does not answer, and the run is kept on this machine. "
            f"Send it later: wandb sync {folder} ({text})"
        )
    return run


def end(run: wandb.Run, exit_code: int) -> None:
    """Call ``run.finish``, and end wandb's service process."""
    global _dead
    try:
        run.finish(exit_code=exit_code)
    except Exception:
        _dead = run
        _tear_down()  # otherwise wandb returns this run from the next init
        raise
    release()


def release() -> None:
    """End wandb's service process if only this plugin uses it; otherwise the program's end does."""
    if _alone and existing() is None:
        _tear_down()


def _tear_down() -> None:
    # SystemExit: the service's exit code, if it is not 0.
    with suppress(Exception, SystemExit):
        load().teardown()
