"""Bagua's environment variables: one is used, the others are named in a warning."""

from __future__ import annotations

import os

from geartrain import UsageError
from geartrain.plugin_api import warn
from geartrain_bagua.buckets import BUCKET_BYTES

#: Bytes at which a bucket is full, as in Bagua.
BUCKET_SIZE = "BAGUA_DEFAULT_BUCKET_SIZE"
#: Bagua's variables without its prefix: the address of the autotune service.
_OTHERS = ("AUTO_TUNE_SERVER_ADDR",)


def bucket_bytes() -> int:
    """Return ``BAGUA_DEFAULT_BUCKET_SIZE`` in bytes, or Bagua's default of 10 MiB.

    Raises:
        UsageError: the variable is set, but is not a whole number above 0.
    """
    text = os.environ.get(BUCKET_SIZE, "").strip()
    if not text:
        return BUCKET_BYTES
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f"{BUCKET_SIZE}={text!r} must be a number of bytes above 0. "
            f"Fix: {BUCKET_SIZE}={BUCKET_BYTES}, or unset it"
        )
    return int(text)


def ignored() -> list[str]:
    """Return the names of Bagua's variables that are set but not supported; 0 counts as not set."""
    set_ = [name for name, value in os.environ.items() if value not in ("", "0")]
    return sorted(
        name
        for name in set_
        if name in _OTHERS or (name.startswith("BAGUA_") and name != BUCKET_SIZE)
    )


def check(label: str) -> None:
    """Check Bagua's variables before processes start; warn of those that are not supported.

    Args:
        label: the strategy's label, for the warning.

    Raises:
        UsageError: as :func:`bucket_bytes`.
    """
    bucket_bytes()
    if names := ignored():
        warn(f"{label}: {', '.join(names)} has no effect. Fix: unset it; see docs/from-bagua.md")
