"""Collectives of many tensors, with one message for each dtype and device, and of objects.

The tensors of a tree are flattened and concatenated, one collective runs on the result, and
PyTorch's differentiable operations split it again. The gradient of a leaf without a cotangent is
zero.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._containers import flatten_one_level
from gradwire._groups import message_device
from gradwire.collectives import wire
from gradwire.collectives.consistency import CallSignature, tensor_fields
from gradwire.collectives.operation import Operation, Plan, concat
from gradwire.collectives.validation import (
    Op,
    check_dense,
    equal_sizes,
    reduction_of,
    resolve_group,
)
from gradwire.collectives.without_root import AllGather, AllReduce, ReduceScatter, ReductionPlan
from gradwire.errors import ArgumentError


def all_reduce_coalesced(
    tree: Any, op: Op = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """Apply `all_reduce` to every tensor in a list or other pytree.

    Args:
        tree: Nested containers of tensors of any shapes and dtypes, with the same structure on all
            ranks: lists, tuples, dicts and other mappings, deques, dataclasses, and types
            registered with PyTorch's pytrees or `gradwire.devices.register_container`. The order
            of a mapping's items may differ between ranks if its keys are strings, numbers, enum
            members, or tuples, frozen sets or dataclasses of these. For a pytree node whose
            children have no known keys, the ranks compare its context, if it has one.
        op: Reduction, as in `all_reduce`.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A tree of the same structure, with the reductions.

    Adjoint: as in `all_reduce`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is not a tensor.
        ArgumentError, MismatchError: See `all_reduce`.

    Example:
        >>> from gradwire.collectives import all_reduce_coalesced
        >>> def main():
        ...     return all_reduce_coalesced({"a": torch.ones(2), "b": torch.tensor(3)})
        >>> run_ranks(main, world_size=2)[0]
        {'a': tensor([2., 2.]), 'b': tensor(6)}
    """
    members = resolve_group(group)
    return _coalesced(tree, check, lambda flat: AllReduce(members, reduction_of(flat, op)))


def all_gather_coalesced(
    tree: Any, *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """Apply `all_gather` along the first dim to every tensor in a list or other pytree.

    Args:
        tree: Tree, as in `all_reduce_coalesced`. A 0-d tensor counts as one of size 1.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: as in `all_gather`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is not a tensor.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather_coalesced
        >>> def main():
        ...     return all_gather_coalesced([torch.ones(2) * dist.get_rank(), torch.ones(1)])
        >>> run_ranks(main, world_size=2)[0]
        [tensor([0., 0., 1., 1.]), tensor([1., 1.])]
    """
    members = resolve_group(group)
    world = members.size()
    return _coalesced(
        tree,
        check,
        lambda flat: AllGather(members),
        shape=lambda leaf: (world * (leaf.shape[0] if leaf.dim() else 1), *leaf.shape[1:]),
        copies=world,
    )


def reduce_scatter_coalesced(
    tree: Any, op: Op = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Any:
    """Apply `reduce_scatter` along the first dim to every tensor in a list or other pytree.

    Args:
        tree: Tree, as in `all_reduce_coalesced`. The first dims must be divisible by the number of
            ranks.
        op: Reduction, as in `all_reduce`.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: as in `reduce_scatter`, for each tensor.

    Raises:
        ArgumentTypeError: A leaf is not a tensor.
        ArgumentError: A first dim cannot be split.
        MismatchError: With checks on, the ranks disagree.
    """
    members = resolve_group(group)
    world = members.size()

    def by_rank(leaf: Tensor) -> Tensor:
        if not leaf.dim():
            raise ArgumentError("a leaf is 0-d, and cannot be split: give it a dim")
        equal_sizes(leaf.shape[0], members, "a leaf")
        return leaf.reshape(world, leaf.numel() // world)

    return _coalesced(
        tree,
        check,
        lambda flat: ReduceScatter(members, None, reduction_of(flat, op)),
        by_rank,
        lambda leaf: (leaf.shape[0] // world, *leaf.shape[1:]),
    )


def all_gather_object(obj: Any, *, group: ProcessGroup | None = None) -> list[Any]:
    """Gather the Python objects of all ranks, on every rank.

    Objects are pickled: receive them only from ranks that run code you trust.

    Args:
        obj: Object that can be pickled.
        group: Process group; the default group if None.

    Example:
        >>> from gradwire.collectives import all_gather_object
        >>> run_ranks(lambda: all_gather_object({"rank": dist.get_rank()}), world_size=2)
        [[{'rank': 0}, {'rank': 1}], [{'rank': 0}, {'rank': 1}]]
    """
    group = resolve_group(group)
    data = bytearray(pickle.dumps(obj))
    own = torch.frombuffer(data, dtype=torch.uint8).to(message_device(group))
    sizes = [count for (count,) in wire.gather_ints([len(own)], group)]
    pieces = wire.all_gather(own, sizes, group, blocking=True).wait().cpu().split(sizes)
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]


def _coalesced(
    tree: Any,
    check: bool | None,
    plan_of: Callable[[Tensor], Plan],
    flatten: Callable[[Tensor], Tensor] = lambda leaf: leaf.reshape(-1),
    shape: Callable[[Tensor], Sequence[int]] = lambda leaf: leaf.shape,
    copies: int = 1,
) -> Any:
    """Run a collective on a tree's tensors, once per dtype and device, in order of occurrence."""
    # `flatten` returns a leaf's elements in one row, or in one row per rank. `plan_of` gets the
    # leaves' rows, concatenated along the last dim. The result has `copies` copies of a row.
    names: list[str] = []
    leaves: list[Any] = []
    contexts: list[str] = []
    # Equal trees have the same order of leaves, and thus of collectives.
    unflatten = _collect(tree, "", names, leaves, contexts)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        check_dense(leaf, f"leaf {i} of the tree")
        kinds.setdefault((leaf.dtype, leaf.device), []).append(i)
    results: list[Tensor] = list(leaves)
    for indices in kinds.values():
        rows = [flatten(leaves[i]) for i in indices]
        flat = concat(rows, rows[0].dim() - 1)
        named = [(names[i], leaves[i].shape) for i in indices]
        # A node's context may determine the order of the leaves; only a check compares it.
        moved = _moved(plan_of(flat), flat, named, bool(contexts) or check)
        widths = [row.shape[-1] for row in rows]
        pieces = moved.reshape(copies, sum(widths)).split(widths, -1)
        for i, piece in zip(indices, pieces, strict=True):
            # A clone, because views of one buffer would share memory and a version counter.
            results[i] = piece.reshape(tuple(shape(leaves[i]))).clone()
    return unflatten(results)


def _moved(
    plan: Plan, flat: Tensor, named: Sequence[tuple[str, Sequence[int]]], check: bool | None
) -> Tensor:
    def signature() -> CallSignature:
        text = ", ".join(f"{name} {tuple(shape)}" for name, shape in named)
        reduce = plan.op if isinstance(plan, ReductionPlan) else ""
        return CallSignature(plan.name, *tensor_fields(flat), reduce, detail=f"leaves {text}")

    moved: Tensor = Operation(flat, plan.group, signature, lambda flat, peers: plan).run(check)
    return moved


def _collect(
    node: Any, name: str, names: list[str], leaves: list[Any], contexts: list[str]
) -> Callable[[Sequence[Any]], Any]:
    """Append a node's leaves; return the function that rebuilds the node from all leaves."""
    # Tensors first: most leaves are tensors, and need no test for other types.
    flattened = None if type(node) in (Tensor, Parameter) else flatten_one_level(node)
    if flattened is None:
        index = len(leaves)
        names.append(name)
        leaves.append(node)
        return lambda new: new[index]
    keys, children, unflatten = flattened.keys, flattened.children, flattened.unflatten
    if flattened.context is not None:
        text = _text(flattened.context)
        # The context, and not only the path, identifies the node's leaves.
        contexts.append(text)
        name += f"<{text}>"
    texts = [_text(key) for key in keys]
    order = list(range(len(texts)))
    # Mappings with the same keys are equal, although the order of their items may differ between
    # ranks. The texts of the keys are the same on all ranks.
    if not isinstance(keys, range):
        order.sort(key=texts.__getitem__)  # stable: equal texts keep the order of insertion
    builders = {
        i: _collect(children[i], f"{name}[{texts[i]}]", names, leaves, contexts) for i in order
    }
    return lambda new: unflatten([builders[i](new) for i in range(len(builders))])


def _text(key: Any) -> str:
    """Return a key's text, which contains no address, hash or tensor value of this process."""
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
