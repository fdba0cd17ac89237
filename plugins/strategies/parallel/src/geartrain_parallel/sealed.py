"""Seals of what ranks send to each other: no other process can forge it.

A rank unpickles what it receives, which may run code. A store on the loopback interface has no
password: any local process that finds its port may write there, and so lead a rank to itself.
Ranks that geartrain starts on one node therefore share a secret, which /proc shows to the same user
alone, and a rank reads only what has been sealed with it. So does gloo, which would crash on bytes
that it cannot parse: ranks on CPUs give it a :class:`geartrain_parallel.rendezvous.SealedStore`.
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


def seal(data: bytes, key: str = "") -> bytes:
    """Return data with its seal in front.

    Args:
        key: of the data in a store; nobody can move them to another one.
    """
    return _seal_of(data, key) + data


def unseal(data: bytes, key: str = "") -> bytes:
    """Return the data that was sealed with the same key.

    Raises:
        TrainingError: no rank of this run has sealed it.
    """
    content = data[SIZE:]
    if not hmac.compare_digest(data[:SIZE], _seal_of(content, key)):
        message = "a message to this rank was not sent by a rank of this run"
        hint = f"let no other program use its ports, and give all ranks the same {SECRET}"
        raise TrainingError(f"{message}. Fix: {hint}")
    return content


def _seal_of(data: bytes, key: str) -> bytes:
    secret, text = os.environ.get(SECRET), key.encode()
    content = len(text).to_bytes(8, "little") + text + data
    return hmac.digest(secret.encode(), content, "sha256") if secret else bytes(SIZE)
