"""Sums over ranks in a fixed order, a binary tree, whoever adds which part of it.

Addition of floats is not associative: another order gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

#: A node of the tree: the ranks from the first number up to, but without, the second.
Node = tuple[int, int]


def children(node: Node) -> tuple[Node, Node]:
    """Return the two nodes whose sum a node is; the first one is a complete tree."""
    first, end = node
    middle = first + (1 << ((end - first - 1).bit_length() - 1))
    return (first, middle), (middle, end)


def whole_nodes(node: Node, ranks: Collection[int]) -> list[Node]:
    """Return the largest nodes below ``node`` of which all ranks are in ``ranks``."""
    first, end = node
    found = [rank in ranks for rank in range(first, end)]
    if all(found):
        return [node]
    return (
        [each for child in children(node) for each in whole_nodes(child, ranks)]
        if any(found)
        else []
    )


def total(node: Node, leaf: Callable[[Node], torch.Tensor | None]) -> torch.Tensor:
    """Return the sum of a node.

    Args:
        leaf: returns the sum of a node that is known, which may be changed; ``None`` for others.
    """
    known = leaf(node)
    if known is not None:
        return known
    lower, upper = children(node)
    return total(lower, leaf).add_(total(upper, leaf))
