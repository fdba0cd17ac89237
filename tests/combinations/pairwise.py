"""A covering array: few combinations that contain each pair of values of different factors."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

#: The number of random completions of a pair; the one that covers most pairs is used.
TRIES = 50

#: Two values with the names of their factors.
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """Yield each pair of values of a combination."""
    return map(frozenset, combinations(row.items(), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]], never: Collection[Pair] = ()
) -> list[dict[str, Any]]:
    """Return combinations that together contain every pair of values; the same in every run.

    Args:
        factors: name -> values.
        never: pairs that cannot exist. A combination without them must exist for each other pair.

    Source: one row at a time, greedily, as in Cohen et al., "The AETG system", 1997.
    """
    draws = random.Random(0)
    every = (
        Pair([(a, x), (b, y)])
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
    )
    # A dict keeps the order; the order of a set of strings differs between processes.
    left = dict.fromkeys(pair for pair in every if pair not in never)
    rows = []
    while left:
        fixed = dict(next(iter(left)))
        tries = []
        while len(tries) < TRIES:
            row = {
                name: fixed[name] if name in fixed else draws.choice(values)
                for name, values in factors.items()
            }
            if not any(pair in never for pair in pairs_of(row)):
                tries.append(row)
        rows.append(max(tries, key=lambda row: sum(pair in left for pair in pairs_of(row))))
        for pair in pairs_of(rows[-1]):
            left.pop(pair, None)
    return rows
