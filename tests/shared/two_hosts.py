"""Two hosts on one machine, as network namespaces."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextmanager
def two_hosts(network: str, mtu: int = 1500) -> Iterator[list[str]]:
    """Create two connected namespaces with the addresses 1 and 2 of a network; yield their names.

    Args:
        network: the network's first three numbers, such as "10.99.0".
        mtu: bytes of the largest packet.
    """
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    unique = uuid.uuid4().hex[:6]
    names = [f"gear-{unique}-{i}" for i in range(2)]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
            made.append(name)
        first, second = (f"v{unique}{i} netns {name}" for i, name in enumerate(names))
        ip(*f"link add {first} type veth peer name {second}".split())
        for i, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{network}.{i + 1}/24", "dev", f"v{unique}{i}")
            ip("-n", name, "link", "set", f"v{unique}{i}", "mtu", str(mtu), "up")
        yield names
    finally:
        for name in made:  # this also deletes the connection
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
