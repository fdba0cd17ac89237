"""Let ranks agree on a collective of a library before they enter it.

gloo ends the process, which Python cannot catch, if ranks exchange different sizes. If the sizes
are equal by chance, ranks get each other's values, and nothing fails.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from geartrain_parallel import headers

if TYPE_CHECKING:
    from geartrain import Run, TrainingError

#: Keys of the store; a rank cannot be so many collectives ahead of another one.
_SLOTS = 4096
#: The key of the error of a rank that came to another collective.
APART = "apart"


class CollectiveOrder:
    """The order of a library's collectives, in each of which all ranks take part.

    The first rank that comes to a collective writes its name into the run's store. The others
    compare it with theirs. This takes one call of the store: alone 23 µs.

    Args:
        run: of this rank.
        fix: the end of the error.
        group: the name of the ranks that agree; default: all.
    """

    def __init__(self, run: Run, fix: str, group: str = "all") -> None:
        self._fix, self._group = fix, group
        # On a GPU ranks do not wait here: NCCL has timeouts of its own.
        self._store = run.store if dist.get_backend() == "gloo" else None
        self._rank, self._size = run.world.rank, run.world.size
        self._number, self._slots = 0, [""] * _SLOTS

    def expect(self, name: str) -> None:
        """Check that the other ranks come to this collective, too.

        Raises:
            TrainingError: another rank has come to another one.
        """
        if self._store is None:
            return
        slot, place = self._number % _SLOTS, name + headers.line(sys._getframe(1))
        expected = f"{self._number}\n{name}\n"
        # Each rank knows the value that the slot had, which it has read.
        value = self._store.compare_set(
            f"agreed/{self._group}/{slot}",
            self._slots[slot],
            f"{expected}{self._rank}\n{place}",
        ).decode()
        self._slots[slot] = value
        self._number += 1
        if not value.startswith(expected):
            raise self._error(place, *value.split("\n")[2:])

    def _error(self, place: str, first: str, other: str) -> TrainingError:
        places = [""] * self._size
        places[self._rank], places[int(first)] = place, other
        error = headers.apart(places, self._fix)
        assert self._store is not None
        self._store.set(APART, str(error))  # the first rank waits, and sees a closed connection
        return error
