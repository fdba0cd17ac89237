"""Seals of what ranks send to each other: no other process can forge it.

A rank unpickles what it receives, which may run code. A store on the loopback interface has no
password: any local process that finds its port may write there, and so lead a rank to itself.
Ranks that geartrain starts on one node therefore share a secret, which /proc shows to the same user
alone, and a rank reads only what has been sealed with it.
"""

from __future__ import annotations

import hmac
import os
import secrets

from geartrain import TrainingError

#: The environment variable with the secret. Ranks without it, as those of torchrun, seal nothing.
SECRET = "GEARTRAIN_SECRET"
#: The bytes of a seal.
SIZE = 32


def share_secret() -> None:
    """Set the secret that ranks which this process starts inherit."""
    os.environ.setdefault(SECRET, secrets.token_hex(SIZE))


def seal(data: bytes) -> bytes:
    """Return data with its seal in front."""
    return _seal_of(data) + data


def unseal(data: bytes) -> bytes:
    """Return the data that was sealed.

    Raises:
        TrainingError: no rank of this run has sealed it.
    """
    content = data[SIZE:]
    if not hmac.compare_digest(data[:SIZE], _seal_of(content)):
        message = "a message to this rank was not sent by a rank of this run"
        hint = f"let no other program use its ports, and give all ranks the same {SECRET}"
        raise TrainingError(f"{message}. Fix: {hint}")
    return content


def _seal_of(data: bytes) -> bytes:
    secret = os.environ.get(SECRET)
    return hmac.digest(secret.encode(), data, "sha256") if secret else bytes(SIZE)
