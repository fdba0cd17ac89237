"""The rank of this process, from horovodrun's variables. Needs no Horovod."""

import pytest

from geartrain.plugin_api import detect
from geartrain_parallel.nodes import with_address

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
        ({"HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "0"}, (3, 4, 1, 4, 0), "127.0.0.1"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, (3, 4, 1, 2, 1), "a"),
    ],
    ids=["one node", "an address"],
)
def test_places(changes, expected, address):
    environ = {**HOROVODRUN, **changes}
    place = with_address(detect(environ), environ)
    assert (place.launcher, numbers(place), place.master_addr) == ("horovodrun", expected, address)


def test_ranks_on_several_nodes_need_no_address():
    assert numbers(detect(HOROVODRUN)) == (3, 4, 1, 2, 1)


def test_ranks_of_horovodrun_agree_on_a_port_though_each_has_another_parent():
    here = {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "4"}

    def port(**changes):
        environ = {**here, **changes}
        return with_address(detect(environ), environ).master_port

    assert port(HOROVOD_RANK="0", HOROVOD_LOCAL_RANK="0") == port()
    assert port(HOROVOD_GLOO_RENDEZVOUS_PORT="4243") != port()
