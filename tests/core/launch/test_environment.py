"""The launcher and the rank of this process, from torchrun's variables and the user's."""

import os

import pytest

from geartrain import UsageError
from geartrain.launch.cluster import ClusterEnvironment, detect

STARTED_BY = ClusterEnvironment.started_by


def environ(text):
    """Return the variables of ``NAME=value`` words, as ``env`` takes them."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = environ("""
    TORCHELASTIC_RUN_ID=none RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4
    GROUP_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29400
""")
BY_HAND = environ("MASTER_ADDR=localhost MASTER_PORT=12910 WORLD_SIZE=3 NODE_RANK=0 LOCAL_RANK=2")
SECOND_NODE = environ("WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=a MASTER_PORT=1")


def numbers(place: ClusterEnvironment) -> tuple[int, ...]:
    return place.rank, place.size, place.local_rank, place.local_size, place.node_rank


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1)),
        ({**TORCHRUN, STARTED_BY: str(os.getpid())}, "geartrain", (5, 8, 1, 4, 1)),
        (BY_HAND, "environment", (2, 3, 2, 3, 0)),
        ({**SECOND_NODE, "RANK": "3"}, "environment", (3, 4, 1, 2, 1)),
        ({**SECOND_NODE, "LOCAL_WORLD_SIZE": "2"}, "environment", (3, 4, 1, 2, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_places(environ, launcher, expected):
    place = detect(environ)
    assert place.launcher == launcher
    assert numbers(place) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "a"},
        {**TORCHRUN, STARTED_BY: str(os.getpid() + 1)},
        {**BY_HAND, STARTED_BY: "1"},
    ],
    ids=[
        "nothing",
        "no local rank",
        "inside a rank",
        "inside a rank by hand",
    ],
)
def test_no_place(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, ("torchrun", "rank 8 of 8")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ("torchrun", "local rank 4 of 4")),
        ({**BY_HAND, "LOCAL_RANK": "3"}, ("rank 3 of 3",)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0", "GROUP_RANK": ""}, ("local rank 1 of 0",)),
        (
            {**BY_HAND, "NODE_RANK": "1", "LOCAL_RANK": "0"},
            ("NODE_RANK=1", "RANK", "LOCAL_WORLD_SIZE"),
        ),
    ],
)
def test_contradictions_are_refused(environ, words):
    with pytest.raises(UsageError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)
