"""The rank of this process, from horovodrun's variables. Needs no Horovod."""

import pytest

from geartrain.plugin_api import detect

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}


def numbers(place):
    return place.rank, place.size, place.local_rank, place.local_size, place.node_rank


@pytest.mark.parametrize(
    ("changes", "expected", "address"),
    [
        ({}, (3, 4, 1, 2, 1), None),
        ({"HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "0"}, (3, 4, 1, 4, 0), "127.0.0.1"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, (3, 4, 1, 2, 1), "a"),
    ],
    ids=["two nodes", "one node", "an address"],
)
def test_places(changes, expected, address):
    place = detect({**HOROVODRUN, **changes})
    assert (place.launcher, numbers(place), place.master_addr) == ("horovodrun", expected, address)


def test_ranks_of_horovodrun_agree_on_a_port_though_each_has_another_parent():
    here = {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "4"}
    port = detect(here).master_port
    assert detect({**here, "HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}).master_port == port
    assert detect({**here, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4243"}).master_port != port
