"""Environment variables of Bagua's that a user may still have set: one is honoured, the others are named in a warning."""

from __future__ import annotations

import os
import warnings

from geartrain import UsageError
from geartrain_bagua.buckets import BUCKET_BYTES

#: Bytes at which a bucket is closed, as under Bagua.
BUCKET_SIZE = "BAGUA_DEFAULT_BUCKET_SIZE"
#: Bagua's, without its prefix: the autotune service's address.
_OTHERS = ("AUTO_TUNE_SERVER_ADDR",)


def bucket_bytes() -> int:
    """Bytes at which a bucket is closed: ``BAGUA_DEFAULT_BUCKET_SIZE``, or Bagua's default of 10 MiB.

    Raises:
        UsageError: the variable is set and no whole number above 0.
    """
    text = os.environ.get(BUCKET_SIZE, "").strip()
    if not text:
        return BUCKET_BYTES
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f"{BUCKET_SIZE}={text!r} is no number of bytes above 0. Fix: {BUCKET_SIZE}={BUCKET_BYTES}, or unset it"
        )
    return int(text)


def ignored() -> list[str]:
    """Names of Bagua's variables that ask for something which is not here; 0 asks for nothing."""
    set_ = [name for name, value in os.environ.items() if value not in ("", "0")]
    return sorted(
        name
        for name in set_
        if name in _OTHERS or (name.startswith("BAGUA_") and name != BUCKET_SIZE)
    )


def check(label: str) -> None:
    """Look at Bagua's variables, before anything starts.

    Args:
        label: the strategy's, for the warning.

    Raises:
        UsageError: as ``bucket_bytes``.
    """
    bucket_bytes()
    if names := ignored():
        warnings.warn(
            f"{label}: {', '.join(names)} changes nothing here: see docs/from-bagua.md",
            stacklevel=2,
        )
