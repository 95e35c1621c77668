"""torch.distributed.nn.functional, implemented by gradwire.collectives, with PyTorch's signatures.

Functions that take an output tensor write the values to it, and also return a separate tensor, so
that the output tensor may be reused without affecting gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from gradwire import collectives as ours
from gradwire.collectives import check_dense, unstack
from gradwire.compat.replacements import Replacement, as_runtime_error
from gradwire.errors import ArgumentError

SUM: Any = ReduceOp.SUM


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Any:
    """See gradwire.collectives.broadcast."""
    return ours.broadcast(tensor, src, group=group)


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """See gradwire.collectives.gather; returns a tuple, of zeros on ranks other than `dst`."""
    check_dense(tensor)
    whole = ours.gather(tensor.reshape(-1), dst, group=group)
    parts = unstack(whole, (tensor.numel(),) * dist.get_world_size(group))
    return tuple(part.view(tensor.shape) for part in parts)


def scatter(
    tensors: Sequence[Tensor] | None, src: int = 0, group: ProcessGroup | None = None
) -> Any:
    """See gradwire.collectives.scatter; gradients of a receiver's tensors are zero."""
    return ours.scatter(tensors, src, group=group)


def reduce(tensor: Tensor, dst: int, op: Any = SUM, group: ProcessGroup | None = None) -> Any:
    """See gradwire.collectives.reduce; returns zeros on ranks other than `dst`."""
    return ours.reduce(tensor, dst, op, group=group)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = SUM, group: ProcessGroup | None = None
) -> Tensor:
    """See gradwire.collectives.reduce_scatter."""
    _check_count("input_list", input_list, group)
    own = input_list[dist.get_rank(group)]
    _check_output("output", output, own.shape, own.dtype)
    flat = ours.reduce_scatter([x.reshape(-1) for x in input_list], op, group=group)
    return _written(output, flat.view(own.shape))


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> Any:
    """See gradwire.collectives.all_gather_list."""
    return ours.all_gather_list(tensor, group=group)


def _all_gather_base(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See gradwire.collectives.all_gather."""
    world = dist.get_world_size(group)
    if output_tensor.numel() != world * input_tensor.numel():
        raise ArgumentError(
            f"output_tensor has {output_tensor.numel()} elements: give {world} times as many as "
            f"input_tensor, which has {input_tensor.numel()}"
        )
    _check_output("output_tensor", output_tensor, output_tensor.shape, input_tensor.dtype)
    whole = ours.all_gather(input_tensor.reshape(-1), group=group)
    return _written(output_tensor, whole.view(output_tensor.shape))


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
) -> tuple[Tensor, ...]:
    """See gradwire.collectives.all_to_all; shapes may differ in every dim."""
    for name, tensors in (("output", output_tensor_list), ("input", input_tensor_list)):
        _check_count(f"{name}_tensor_list", tensors, group)
    pieces = ours.all_to_all(
        [x.reshape(-1) for x in input_tensor_list],
        output_splits=[out.numel() for out in output_tensor_list],
        group=group,
    )
    pairs = zip(output_tensor_list, pieces, strict=True)
    return tuple(_written(out, piece.view(out.shape)) for out, piece in pairs)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """See gradwire.collectives.all_to_all."""
    _check_output("output", output, (len(output), *input.shape[1:]), input.dtype)
    if output_split_sizes or input_split_sizes or len(output) != len(input):
        output_split_sizes = output_split_sizes or _equal("output", output, group)
        input_split_sizes = input_split_sizes or _equal("input", input, group)
    received = ours.all_to_all(
        input,
        input_splits=input_split_sizes or None,
        output_splits=output_split_sizes or None,
        group=group,
    )
    return _written(output, received)


def all_reduce(tensor: Tensor, op: Any = SUM, group: ProcessGroup | None = None) -> Tensor:
    """See gradwire.collectives.all_reduce."""
    return ours.all_reduce(tensor, op, group=group)


def _written(output: Tensor, result: Tensor) -> Tensor:
    with torch.no_grad():
        output.copy_(result)
    return result


def _equal(name: str, tensor: Tensor, group: ProcessGroup | None) -> list[int]:
    world = dist.get_world_size(group)
    if len(tensor) % world:
        raise ArgumentError(
            f"{name} has {len(tensor)} rows, which is not divisible by {world}: give "
            f"{name}_split_sizes"
        )
    return [len(tensor) // world] * world


def _check_count(name: str, tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    world = dist.get_world_size(group)
    if len(tensors) != world:
        raise ArgumentError(
            f"{name} has {len(tensors)} tensors: give one for each of {world} ranks"
        )


def _check_output(name: str, output: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(output.shape) != tuple(shape) or output.dtype != dtype:
        raise ArgumentError(
            f"{name} has shape {tuple(output.shape)} and dtype {output.dtype}: give a tensor of "
            f"shape {tuple(shape)} and dtype {dtype}"
        )


_FUNCTIONAL = "torch.distributed.nn.functional"
_BOTH = (_FUNCTIONAL, "torch.distributed.nn")

TABLE = tuple(
    Replacement(
        as_runtime_error(function),
        function.__name__,
        (_FUNCTIONAL,) if function is _all_gather_base else _BOTH,
        wherever_loaded=True,
    )
    for function in (
        broadcast,
        gather,
        scatter,
        reduce,
        reduce_scatter,
        all_gather,
        _all_gather_base,
        all_to_all,
        all_to_all_single,
        all_reduce,
    )
)
"""Replacements, and the modules of PyTorch that receive them."""
