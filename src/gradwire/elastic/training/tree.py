"""The one tree in which shards' gradients are added, whoever computed them: integers alone.

The tree is binary and complete over a power of two of shards. A *node* is the run of shards below
it. A member adds up the largest nodes that lie within its own run of shards; the nodes above them
are added from these in the same order, wherever that happens. So every addition has the same two
operands with any number of members, and the sum the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
"""The first shard below a node, and how many there are: a power of two that divides the first."""

Value = TypeVar("Value")


def nodes_within(run: range) -> list[Node]:
    """The largest nodes that together are a run of shards, from left to right.

    Example:
        >>> nodes_within(range(3, 8))
        [(3, 1), (4, 4)]
    """
    nodes, first = [], run.start
    while first < run.stop:
        size = first & -first or 1 << (run.stop.bit_length())
        while first + size > run.stop:
            size //= 2
        nodes.append((first, size))
        first += size
    return nodes


def sibling(node: Node) -> Node:
    """The node that is added to a node."""
    first, size = node
    return first ^ size, size


def parent(node: Node) -> Node:
    """The node that both are added to."""
    first, size = node
    return first & ~size, 2 * size


def add_up(
    shards: int, values: Mapping[Node, Value], add: Callable[[Value, Value], Value]
) -> Value:
    """The value of the root, from those of nodes that together are all shards.

    Args:
        shards: How many there are.
        values: Of each node; none is below another.
        add: Called with a left and a right child's value; it may write to the left one.

    Example:
        >>> add_up(4, {(0, 2): "ab", (2, 1): "c", (3, 1): "d"}, lambda x, y: f"({x}+{y})")
        '(ab+(c+d))'
    """
    pending: list[tuple[Node, Value]] = []
    for node in sorted(values):
        merged = push(pending, node, values[node], add)
    assert merged == (0, shards), "the nodes are not the tree's leaves"
    return pending[0][1]


def push(
    pending: list[tuple[Node, Value]],
    node: Node,
    value: Value,
    add: Callable[[Value, Value], Value],
) -> Node:
    """Append a node to those on its left, and add what are siblings: at most log2 are pending.

    Returns:
        The node that it has become part of.
    """
    pending.append((node, value))
    while len(pending) > 1 and pending[-2][0] == sibling(pending[-1][0]) < pending[-1][0]:
        (left, first), (_, second) = pending[-2:]
        pending[-2:] = [(parent(left), add(first, second))]
    return pending[-1][0]
