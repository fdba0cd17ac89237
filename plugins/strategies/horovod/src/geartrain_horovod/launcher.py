"""horovodrun: the place of this process, from its variables."""

from __future__ import annotations

from collections.abc import Mapping

from geartrain.plugin_api import ClusterEnvironment

_read_numbers = ClusterEnvironment.read_numbers

_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def horovodrun(environ: Mapping[str, str]) -> ClusterEnvironment | None:
    """Read the variables of horovodrun on Gloo; on MPI it sets MPI's.

    Source: https://horovod.readthedocs.io/en/stable/running_include.html
    """
    found = _read_numbers(environ, *(f"HOROVOD_{n}" for n in _NUMBERS))
    if found is None:
        return None
    rank, size, local_rank, local_size, node_rank, _ = found
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return ClusterEnvironment("horovodrun", rank, size, local_rank, local_size, node_rank, job=port)
