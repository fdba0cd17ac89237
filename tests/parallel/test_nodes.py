"""The node's number and the address of rank 0, if geartrain starts the ranks."""

import pytest

from geartrain import UsageError
from geartrain_parallel.nodes import master, node_rank


@pytest.mark.parametrize(
    ("nodes", "environ", "words"),
    [
        (2, {"NODE_RANK": "2"}, ("NODE_RANK=2", "num_nodes=2", "0 to 1")),
        (1, {"NODE_RANK": "1"}, ("NODE_RANK=1", "num_nodes=1")),
        (2, {}, ("num_nodes=2", "NODE_RANK", "MASTER_ADDR")),
        (2, {"NODE_RANK": "-1"}, ("NODE_RANK='-1'",)),
    ],
)
def test_a_wrong_node_rank_is_an_error_with_its_name(nodes, environ, words):
    with pytest.raises(UsageError) as caught:
        node_rank(nodes, environ)
    for word in words:
        assert word in str(caught.value)


def test_node_rank():
    assert [
        node_rank(1, {}),
        node_rank(2, {"NODE_RANK": "1"}),
        node_rank(2, {"GROUP_RANK": "1"}),
    ] == [0, 1, 1]


@pytest.mark.parametrize(
    "environ",
    [{}, {"MASTER_ADDR": "a"}, {"MASTER_PORT": "1"}, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}],
)
def test_several_nodes_need_an_address(environ):
    with pytest.raises(UsageError, match=r"MASTER_ADDR.*MASTER_PORT"):
        master(2, environ)


def test_one_node_needs_no_address():
    assert master(1, {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}) == ("127.0.0.1", None)
