"""Validation of arguments: groups, roots, tensors, dims, sizes per rank, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group, rank_in_group
from gradwire.collectives import wire
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError

Sizes = Sequence[int] | Literal["find"] | None
"""Number of rows of each rank; "find" gathers them; None if all ranks have the same number."""


def check_dense(x: object, name: str = "x") -> None:
    """Raise unless `x` is a strided tensor."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}: give a tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
        raise ArgumentError(
            f"{name} has layout {kind}: give dense tensors, for instance its indices and values"
        )


def check_has_data(x: Tensor, name: str) -> None:
    """Raise if the tensor is on the "meta" device, which holds no data to send."""
    if x.device.type == "meta":
        raise ArgumentError(f"{name} is on the meta device on the root: give the tensor to send")


def resolve_group(group: object) -> ProcessGroup:
    """Return the group, or the default group for None, if this rank is a member of it."""
    return check_group(default_group("group") if group is None else group)


def root_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """Return the root's rank in the group, given its global rank or its rank in the group."""
    root = rank_in_group(group, rank, group_rank, name)
    if root is None:
        raise ArgumentError(f"no root: give {name} (a global rank) or group_{name} (in the group)")
    return root


def refuse_in_transforms(what: str, remedy: str) -> None:
    """Raise inside `torch.func` transforms, for an argument that they cannot follow."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise NotSupportedError(f"{what} inside torch.func transforms: {remedy}")


def refuse_split(x: Tensor) -> None:
    """Raise if a collective of the tensor cannot be asynchronous."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            "async_op=True inside torch.func transforms or torch.compile: use async_op=False there"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotSupportedError("async_op=True with a tangent: use async_op=False there")


def resolve_sizes(sizes: Sizes, rows: int, group: ProcessGroup) -> tuple[int, ...] | None:
    """Return the ranks' sizes, or None if all are equal; this rank has `rows` rows."""
    if sizes is None:
        return None
    if isinstance(sizes, str):
        if sizes != "find":
            raise ArgumentError(f'sizes is {sizes!r}: give a size for each rank, "find" or None')
        return tuple(count for (count,) in wire.gather_ints([rows], group))
    given = valid_sizes(sizes, group, "sizes")
    if given[group.rank()] != rows:
        raise ArgumentError(
            f"sizes is {list(given)}: the tensor of rank {group.rank()} of the group has size "
            f"{rows}; give every rank's size"
        )
    return given


def valid_sizes(sizes: Sequence[int], group: ProcessGroup, name: str) -> tuple[int, ...]:
    """Return the sizes as a tuple, after checking that there is one for each rank."""
    try:
        given = tuple(int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} is {sizes!r}: give a list with a size for each of {group.size()} ranks"
        ) from error
    if len(given) != group.size() or min(given) < 0:
        raise ArgumentError(
            f"{name} is {list(given)}: give one size ≥ 0 for each of {group.size()} ranks"
        )
    return given


def equal_sizes(rows: int, group: ProcessGroup, what: str) -> tuple[int, ...]:
    """Return an equal number of rows for each rank."""
    if rows % group.size():
        raise ArgumentError(
            f"{what} has size {rows} in the dim that is split, which is not divisible by the "
            f"number of ranks, {group.size()}: give the sizes"
        )
    return (rows // group.size(),) * group.size()


def sizes_of_split(
    sizes: Sequence[int] | None, x: Tensor, dim: int, group: ProcessGroup, *, names: tuple[str, str]
) -> tuple[int, ...]:
    """Return the sizes into which the rows of `x` are split; equal ones by default."""
    name, x_name = names
    if sizes is None:
        return equal_sizes(x.shape[0], group, x_name)
    given = valid_sizes(sizes, group, name)
    if sum(given) != x.shape[0]:
        raise ArgumentError(f"{name} is {list(given)}: {x_name} has {x.shape[0]} in dim {dim}")
    return given


def valid_dim(dim: int, dims: int, shape: Sequence[int]) -> int:
    """Return the dim as a non-negative index."""
    if not -dims <= dim < dims:
        raise ArgumentError(f"dim is {dim}: the tensor has shape {tuple(shape)}")
    return dim % dims


def move_to_front(x: Tensor, dim: int, stack: bool = False) -> tuple[Tensor, int]:
    """Move a dim to the front; return the tensor and the dim as a non-negative index."""
    check_dense(x)
    if stack:
        x = x.unsqueeze(valid_dim(dim, x.dim() + 1, x.shape))
    elif not x.dim():
        x = x.reshape(1)
    dim = valid_dim(dim, x.dim(), x.shape)
    return (x.movedim(dim, 0) if dim else x), dim


def move_back(x: Tensor, dim: int) -> Tensor:
    """Undo `move_to_front`; the result is contiguous."""
    if not dim:
        return x
    y = x.movedim(0, dim).contiguous()
    # If nothing was copied, y is a view. Once an empty view is modified in place, autograd gives
    # its base a constant gradient: a second derivative would end there, on this rank alone.
    return y if y.numel() else y.clone()


def pieces_of(
    xs: object, dim: int, group: ProcessGroup, name: str
) -> tuple[list[Tensor], int, bool]:
    """Return one tensor per rank, the dim as a non-negative index, and True if they were 0-d."""
    if not isinstance(xs, Sequence) or isinstance(xs, str):
        raise ArgumentTypeError(
            f"{name} is a {type(xs).__name__}: give a tensor, or a list with one for each rank"
        )
    if len(xs) != group.size():
        raise ArgumentError(
            f"{name} has {len(xs)} tensors: give one for each of {group.size()} ranks"
        )
    for i, x in enumerate(xs):
        check_dense(x, f"{name}[{i}]")
    first = xs[0]
    scalars = not first.dim()
    dim = valid_dim(dim, max(1, first.dim()), first.shape)
    for i, x in enumerate(xs):
        if x.dtype != first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}[{i}] is {x.dtype} on {x.device}, {name}[0] is {first.dtype} on "
                f"{first.device}: give all tensors one dtype and device"
            )
        if x.dim() != first.dim() or any(
            a != b for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if d != dim
        ):
            raise ArgumentError(
                f"{name}[{i}] has shape {tuple(x.shape)}, {name}[0] has {tuple(first.shape)}: "
                f"shapes may differ in dim {dim} only"
            )
    return [x.reshape(1) if scalars else x for x in xs], dim, scalars


def piece_sizes(
    pieces: Sequence[Tensor], dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[int, ...]:
    """Return the sizes of a list's tensors in a dim; raise if `sizes` is given and differs."""
    own = tuple(piece.shape[dim] for piece in pieces)
    if sizes is not None and valid_sizes(sizes, group, "sizes") != own:
        raise ArgumentError(
            f"sizes is {list(sizes)}: the tensors have sizes {list(own)} in dim {dim}; omit sizes"
        )
    return own


Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""Name of a reduction, or torch.distributed's ReduceOp."""


def reduction_of(x: Tensor, op: object) -> str:
    """Return the reduction's name, if it is defined for the dtype and PyTorch can compute it."""
    names = f"give one of {', '.join(wire.REDUCTIONS)}"
    if isinstance(op, str):
        name = op.lower()
    elif isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        # isinstance(RedOpType, ReduceOp) is also True.
        kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op  # type: ignore[attr-defined]
        name = kind.name.lower()
    else:
        raise ArgumentTypeError(f"op is {op!r}: {names}")
    if name not in wire.REDUCTIONS:
        raise ArgumentError(f"op is {op!r}: {names}")
    check_dense(x)
    real_or_complex = x.is_floating_point() or x.is_complex()
    remedy = ""
    if name in wire.BITWISE and real_or_complex:
        remedy = "give integers or booleans"
    elif name in ("max", "min") and x.is_complex():
        remedy = "complex numbers are not ordered"
    elif name == "avg" and not real_or_complex:
        remedy = "give floating-point numbers"
    elif name == "avg" and x.dtype == torch.complex32:
        remedy = "convert the tensor to complex64"
    elif x.dtype == torch.bool and name not in (*wire.BITWISE, "max", "min"):
        remedy = "give band, bor, bxor, max or min"
    if remedy:
        raise ArgumentError(f"op is {name}, tensor is {x.dtype}: {remedy}")
    wire.check_computable(x, name)
    return name
