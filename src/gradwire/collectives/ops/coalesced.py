"""Collectives of many tensors at once: one message for each dtype and device.

The tensors of a tree are flattened and concatenated, one collective moves them, and they are split
again with torch's own differentiable operations: a leaf that got no cotangent has zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.ranks import resolve_group
from gradwire.collectives.args.reductions import Op
from gradwire.collectives.args.sizes import equal_sizes
from gradwire.collectives.args.tensors import check_dense
from gradwire.collectives.args.trees import flatten_tree, leaves_text
from gradwire.collectives.autograd.unstack import concat
from gradwire.collectives.checks.call_signature import detailed
from gradwire.collectives.ops.all_gather_reduce_scatter import all_gather, reduce_scatter
from gradwire.collectives.ops.all_reduce import all_reduce
from gradwire.collectives.ops.broadcast_reduce import broadcast, reduce
from gradwire.errors import ArgumentError

__all__ = [
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "reduce_coalesced",
    "reduce_scatter_coalesced",
]


def all_reduce_coalesced(
    tree: Any, op: Op = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """`all_reduce` of every tensor in a list or other pytree.

    Args:
        tree: Tensors of any shapes and dtypes in nested containers, the same on all ranks: lists,
            tuples, dicts and other mappings, deques, dataclasses, and types registered with torch's
            pytrees or `gradwire.devices.register_container`. Mappings may have been filled in
            another order, if their keys are strings, numbers, members of enums, or tuples, frozen
            sets or dataclasses of those. A pytree node whose children have no known keys is
            compared with the other ranks' by its context, if it has one.
        op: As in `all_reduce`.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The same structure, with the reductions.

    Adjoint: as in `all_reduce`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is no tensor.
        ArgumentError, MismatchError: As in `all_reduce`.

    Example:
        >>> from gradwire.collectives import all_reduce_coalesced
        >>> def main():
        ...     return all_reduce_coalesced({"a": torch.ones(2), "b": torch.tensor(3)})
        >>> run_ranks(main, world_size=2)[0]
        {'a': tensor([2., 2.]), 'b': tensor(6)}
    """
    return _elementwise(
        tree, check, lambda flat, check: all_reduce(flat, op, group=group, check=check)
    )


def reduce_coalesced(
    tree: Any,
    dst: int | None = None,
    op: Op = "sum",
    *,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Any:
    """`reduce` of every tensor in a list or other pytree.

    Args:
        tree: As in `all_reduce_coalesced`.
        dst: The root's global rank.
        op: As in `all_reduce`.
        group_dst: The root's rank in the group, instead of `dst`.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Adjoint: as in `reduce`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is no tensor.
        ArgumentError, MismatchError: As in `reduce`.
    """

    def move(flat: Tensor, check: bool | None) -> Tensor:
        return reduce(flat, dst, op, group_dst=group_dst, group=group, check=check)

    return _elementwise(tree, check, move)


def broadcast_coalesced(
    tree: Any,
    src: int | None = None,
    *,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Any:
    """`broadcast` of every tensor in a list or other pytree.

    Between processes, differentiable, into new tensors. `gradwire.ddp.broadcast_coalesced`
    overwrites tensors instead, without gradients; `gradwire.devices.broadcast_coalesced` copies
    between the devices of one process.

    Args:
        tree: As in `all_reduce_coalesced`; on receivers the values do not matter.
        src: The root's global rank.
        group_src: The root's rank in the group, instead of `src`.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Adjoint: as in `broadcast`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is no tensor.
        ArgumentError, MismatchError: As in `broadcast`.
    """

    def move(flat: Tensor, check: bool | None) -> Tensor:
        return broadcast(flat, src, group_src=group_src, group=group, check=check)

    return _elementwise(tree, check, move)


def all_gather_coalesced(
    tree: Any, *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """`all_gather` along the first dim of every tensor in a list or other pytree.

    Args:
        tree: As in `all_reduce_coalesced`. A 0-d tensor counts as one of size 1.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Adjoint: as in `all_gather`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is no tensor.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather_coalesced
        >>> def main():
        ...     return all_gather_coalesced([torch.ones(2) * dist.get_rank(), torch.ones(1)])
        >>> run_ranks(main, world_size=2)[0]
        [tensor([0., 0., 1., 1.]), tensor([1., 1.])]
    """
    world = resolve_group(group).size()
    return _coalesced(
        tree,
        check,
        lambda leaf: leaf.reshape(-1),
        lambda flat, check: all_gather(flat, stack=True, group=group, check=check),
        lambda leaf: (world * (leaf.shape[0] if leaf.dim() else 1), *leaf.shape[1:]),
    )


def reduce_scatter_coalesced(
    tree: Any, op: Op = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """`reduce_scatter` along the first dim of every tensor in a list or other pytree.

    Args:
        tree: As in `all_reduce_coalesced`; first dims that the number of ranks divides.
        op: As in `all_reduce`.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Adjoint: as in `reduce_scatter`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is no tensor.
        ArgumentError: A first dim cannot be split.
        MismatchError: With checks on, ranks disagree.
    """
    members = resolve_group(group)
    world = members.size()

    def by_rank(leaf: Tensor) -> Tensor:
        if not leaf.dim():
            raise ArgumentError("a leaf is 0-d, and cannot be cut: give it a dim")
        equal_sizes(leaf.shape[0], members, "a leaf")
        return leaf.reshape(world, leaf.numel() // world)

    return _coalesced(
        tree,
        check,
        by_rank,
        lambda flat, check: reduce_scatter(flat, op, group=group, check=check)[0],
        lambda leaf: (leaf.shape[0] // world, *leaf.shape[1:]),
    )


def _elementwise(
    tree: Any, check: bool | None, move: Callable[[Tensor, bool | None], Tensor]
) -> Any:
    """Run a collective that keeps shapes."""
    return _coalesced(tree, check, lambda leaf: leaf.reshape(-1), move, lambda leaf: leaf.shape)


def _coalesced(
    tree: Any,
    check: bool | None,
    flatten: Callable[[Tensor], Tensor],
    move: Callable[[Tensor, bool | None], Tensor],
    shape: Callable[[Tensor], Sequence[int]],
) -> Any:
    """Run a collective on a tree's tensors, by dtype and device in the order in which these occur.

    That order, and the one of the leaves, is the same for equal trees: see `flatten_tree`.

    Args:
        tree: The tree.
        check: Compare with the other ranks first.
        flatten: Gives a leaf's elements in one row, or a row for each rank.
        move: The collective, on the leaves concatenated along the last dim.
        shape: The shape of a leaf's result.
    """
    names, leaves, unflatten, has_context = flatten_tree(tree)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        check_dense(leaf, f"leaf {i} of the tree")
        kinds.setdefault((leaf.dtype, leaf.device), []).append(i)
    results: list[Tensor] = list(leaves)
    for indices in kinds.values():
        own = [leaves[i] for i in indices]
        rows = [flatten(leaf) for leaf in own]
        with detailed(partial(leaves_text, [names[i] for i in indices], own)):
            # Where the order of the leaves is in a node's context, only comparing shows it.
            moved = move(concat(rows, rows[0].dim() - 1), has_context or check)
        pieces = moved.split([row.shape[-1] for row in rows], -1)
        for i, piece in zip(indices, pieces, strict=True):
            # Cut from one buffer: a copy has memory, and a version counter, of its own.
            results[i] = piece.reshape(tuple(shape(leaves[i]))).clone()
    return unflatten(results)
