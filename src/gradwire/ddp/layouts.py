"""Layouts of tensors: the dense tensors that hold the elements of others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradwire.errors import ArgumentError

SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors that hold a tensor's elements, each of them once.

    Example:
        >>> [part.shape for part in dense_parts(torch.ones(3, 1).expand(3, 5))]
        [torch.Size([3, 1])]
        >>> [part.tolist() for part in dense_parts(torch.tensor([0.0, 7.0]).to_sparse())]
        [[[1]], [7.0]]
    """
    if tensor.layout is torch.strided:
        return [distinct(tensor)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def distinct(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that has each element in memory once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a subclass's values, or the tensor itself."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    return [inner for value in held if isinstance(value, Tensor) for inner in inner_tensors(value)]


def resize_compressed(tensor: Tensor, entries: int) -> None:
    """Give a compressed sparse tensor another number of entries."""
    outer, inner, values = dense_parts(tensor)
    batch = outer.dim() - 1
    new = torch.sparse_compressed_tensor(
        outer.new_zeros(outer.shape),
        inner.new_zeros(*inner.shape[:batch], entries),
        values.new_zeros(*values.shape[:batch], entries, *values.shape[batch + 1 :]),
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
    )
    tensor.resize_as_sparse_(new)


def check_not_expanded(tensor: Tensor, name: str) -> None:
    """Raise if several of a tensor's elements share one element in memory.

    Raises:
        ArgumentError: The tensor is expanded.

    Example:
        >>> check_not_expanded(torch.ones(4), "x")
        >>> try:
        ...     check_not_expanded(torch.ones(1).expand(4), "x")
        ... except ArgumentError as error:
        ...     print(str(error).partition(":")[0])
        x, of shape (4,), is expanded
    """
    if tensor.layout != torch.strided:
        return
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{name}, of shape {tuple(tensor.shape)}, is expanded: several of its elements share "
            "one element in memory, and cannot be written separately; clone() it"
        )
