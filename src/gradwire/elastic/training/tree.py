"""Tree in which the gradients of shards are added, with integers only.

The tree is binary and complete over a power of two of shards. A *node* is the contiguous range of
shards below it. A member adds up the largest nodes within its own shards; the nodes above are added
from these in the same order on any member. So every addition has the same two operands with any
number of members, and the sum has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Node = tuple[int, int]
"""First shard below a node, and their number: a power of two that divides the first."""

Value = TypeVar("Value")


def nodes_of(shards: Iterable[int]) -> list[Node]:
    """Return the largest nodes that together cover shards in ascending order.

    Example:
        >>> nodes_of([1, 3, 4, 5, 6, 7])
        [(1, 1), (3, 1), (4, 4)]
    """
    pending: list[tuple[Node, None]] = []
    for shard in shards:
        push(pending, (shard, 1), None, lambda left, right: None)
    return [node for node, _ in pending]


def sibling(node: Node) -> Node:
    """Return the sibling of a node."""
    first, size = node
    return first ^ size, size


def parent(node: Node) -> Node:
    """Return the parent of a node."""
    first, size = node
    return first & ~size, 2 * size


def add_up(
    shards: int, values: Mapping[Node, Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Return the value of the root, from those of nodes that together cover all shards.

    Args:
        shards: Number of shards.
        values: Value of each node; no node is below another.
        add: Function of the values of a left and a right child; it may write to the left one.

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
    """Append a node, and add siblings: at most log2(shards) nodes are pending.

    Returns:
        Node that contains the appended one.
    """
    pending.append((node, value))
    while len(pending) > 1 and pending[-2][0] == sibling(pending[-1][0]) < pending[-1][0]:
        (left, first), (_, second) = pending[-2:]
        pending[-2:] = [(parent(left), add(first, second))]
    return pending[-1][0]
