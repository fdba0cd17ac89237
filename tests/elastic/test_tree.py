"""Sums in the order of a tree: equal bits, whoever adds which part."""

import torch
from hypothesis import given, strategies as st

from geartrain_elastic.tree import children, total, whole_nodes


def test_children_are_a_complete_tree_and_what_remains():
    assert children((0, 8)) == ((0, 4), (4, 8))
    assert children((0, 7)) == ((0, 4), (4, 7))
    assert children((4, 7)) == ((4, 6), (6, 7))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_sum_does_not_depend_on_who_adds_which_part(owners):
    size = len(owners)
    generator = torch.Generator().manual_seed(size)
    leaves = [torch.randn(5, generator=generator) * 10.0**rank for rank in range(size)]
    root = (0, size)
    alone = total(root, {(r, r + 1): leaves[r].clone() for r in range(size)}.get)
    nodes = {}
    for owner in set(owners):
        ranks = [rank for rank in range(size) if owners[rank] == owner]
        known = {(rank, rank + 1): leaves[rank].clone() for rank in ranks}
        nodes |= {node: total(node, known.get) for node in whole_nodes(root, ranks)}
    assert torch.equal(total(root, nodes.get), alone)
    assert torch.allclose(alone, torch.stack(leaves).sum(0), rtol=1e-4, atol=1e-2)
