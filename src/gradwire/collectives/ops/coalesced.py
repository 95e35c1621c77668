"""Collectives of many tensors at once: one message for each dtype and device.

The tensors of a tree are flattened and concatenated, one collective moves them, and they are split
again with torch's own differentiable operations: a leaf that got no cotangent has zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._containers import flatten_one_level
from gradwire.collectives.args.reductions import Op
from gradwire.collectives.args.sizes import equal_sizes
from gradwire.collectives.args.validation import check_dense, resolve_group
from gradwire.collectives.autograd.unstack import concat
from gradwire.collectives.checks.call_signature import detailed
from gradwire.collectives.ops.all_gather_reduce_scatter import all_gather, reduce_scatter
from gradwire.collectives.ops.all_reduce import all_reduce
from gradwire.collectives.ops.broadcast_reduce import broadcast, reduce
from gradwire.errors import ArgumentError


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


class Tree(NamedTuple):
    """A tree whose leaves are in an order that equal trees share.

    Attributes:
        names: Path of each leaf, the same on all ranks.
        leaves: The leaves.
        unflatten: Builds a tree of the same structure from other leaves in this order.
        has_context: True if a node's context, and not only names, says which leaf is which.
    """

    names: Sequence[str]
    leaves: Sequence[Any]
    unflatten: Callable[[Sequence[Any]], Any]
    has_context: bool


def flatten_tree(tree: Any) -> Tree:
    """Flatten a tree, with the children of dicts and their like sorted by key.

    Mappings with the same keys are equal, in whatever order they were filled, and ranks may have
    filled them differently. They are sorted by what tells keys apart on all ranks.
    """
    names: list[str] = []
    leaves: list[Any] = []
    contexts: list[str] = []
    build = _collect(tree, "", names, leaves, contexts)
    return Tree(names, leaves, build, bool(contexts))


def _collect(
    node: Any, name: str, names: list[str], leaves: list[Any], contexts: list[str]
) -> Callable[[Sequence[Any]], Any]:
    """Append a node's leaves in the shared order; return what builds it from all leaves."""
    # A tensor first: the common leaf needs no look at the other types.
    flattened = None if type(node) in (Tensor, Parameter) else flatten_one_level(node)
    if flattened is None:
        place = len(leaves)
        names.append(name)
        leaves.append(node)
        return lambda new: new[place]
    keys, children, unflatten = flattened.keys, flattened.children, flattened.unflatten
    if flattened.context is not None:
        text = _text(flattened.context)
        contexts.append(text)
        name += f"<{text}>"
    texts = [_text(key) for key in keys]
    order = list(range(len(texts)))
    if not isinstance(keys, range):
        order.sort(key=texts.__getitem__)  # those of one text remain as they were inserted
    builders = {
        i: _collect(children[i], f"{name}[{texts[i]}]", names, leaves, contexts) for i in order
    }
    return lambda new: unflatten([builders[i](new) for i in range(len(builders))])


def _text(key: Any) -> str:
    """Return a key's text, the same in all processes: no address, hash or value of a tensor."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name}"
    if isinstance(key, str | bytes | Number | None):
        return repr(key)
    if isinstance(key, tuple):
        return f"({', '.join([_text(part) for part in key])})"
    if isinstance(key, list):
        return f"[{', '.join([_text(part) for part in key])}]"
    if isinstance(key, dict):
        return f"{{{', '.join([f'{_text(k)}: {_text(part)}' for k, part in key.items()])}}}"
    if isinstance(key, set | frozenset):
        return f"{{{', '.join(sorted([_text(part) for part in key]))}}}"
    if isinstance(key, torch.dtype):
        return str(key)
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        fields = dataclasses.fields(key)
        parts = [f"{f.name}={_text(getattr(key, f.name, None))}" for f in fields]
        return f"{type(key).__name__}({', '.join(parts)})"
    return f"<{type(key).__name__}>"


def leaves_text(names: Sequence[str], leaves: Sequence[Tensor]) -> str:
    """Return which leaf has which shape, for ranks to compare."""
    pairs = zip(names, leaves, strict=True)
    return "leaves " + ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in pairs)
