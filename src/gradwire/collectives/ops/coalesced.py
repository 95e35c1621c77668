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
from torch.utils import _pytree

from gradwire.collectives.args.ranks import resolve_group
from gradwire.collectives.args.reductions import Op
from gradwire.collectives.args.sizes import equal_sizes
from gradwire.collectives.args.tensors import check_dense
from gradwire.collectives.args.trees import leaf_order, leaves_text
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
        tree: Tensors of any shapes and dtypes in lists, dicts and the like, the same on all ranks;
            dicts may have been filled in another order, if their keys are strings, numbers,
            members of enums, or tuples of those.
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
    return _elementwise(tree, lambda flat: all_reduce(flat, op, group=group, check=check))


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
    options: dict[str, Any] = {"group_dst": group_dst, "group": group, "check": check}
    return _elementwise(tree, lambda flat: reduce(flat, dst, op, **options))


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
    options: dict[str, Any] = {"group_src": group_src, "group": group, "check": check}
    return _elementwise(tree, lambda flat: broadcast(flat, src, **options))


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
        lambda leaf: leaf.reshape(-1),
        lambda flat: all_gather(flat, stack=True, group=group, check=check),
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
        by_rank,
        lambda flat: reduce_scatter(flat, op, group=group, check=check)[0],
        lambda leaf: (leaf.shape[0] // world, *leaf.shape[1:]),
    )


def _elementwise(tree: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A collective that keeps shapes."""
    return _coalesced(tree, lambda leaf: leaf.reshape(-1), move, lambda leaf: leaf.shape)


def _coalesced(
    tree: Any,
    flatten: Callable[[Tensor], Tensor],
    move: Callable[[Tensor], Tensor],
    shape: Callable[[Tensor], Sequence[int]],
) -> Any:
    """A collective of a tree's tensors, by dtype and device in the order in which these occur.

    That order, and the one of the leaves, is the same for equal trees: see `leaf_order`.

    Args:
        tree: The tree.
        flatten: Gives a leaf's elements in one row, or a row for each rank.
        move: The collective, on the leaves concatenated along the last dim.
        shape: The shape of a leaf's result.
    """
    leaves, structure = _pytree.tree_flatten(tree)
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, int]]] = {}
    for i, leaf in enumerate(leaves):
        check_dense(leaf, f"leaf {i} of the tree")
    for name, i in leaf_order(tree):
        kinds.setdefault((leaves[i].dtype, leaves[i].device), []).append((name, i))
    results: list[Tensor] = list(leaves)
    for kind in kinds.values():
        indices = [i for _, i in kind]
        rows = [flatten(leaves[i]) for i in indices]
        with detailed(partial(leaves_text, kind, leaves)):
            moved = move(concat(rows, rows[0].dim() - 1))
        pieces = moved.split([row.shape[-1] for row in rows], -1)
        for i, piece in zip(indices, pieces, strict=True):
            # Cut from one buffer: a copy has memory, and a version counter, of its own.
            results[i] = piece.reshape(tuple(shape(leaves[i]))).clone()
    return _pytree.tree_unflatten(results, structure)
