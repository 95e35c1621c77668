"""all_reduce of sparse tensors: ranks exchange their entries, and each adds all of them up."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.shm.algorithms import Algorithms
from gradwire.shm.arithmetic import HALF
from gradwire.shm.header import NUMBERS, Call

__all__ = ["all_reduce"]


def all_reduce(algorithms: Algorithms, size: int, tensor: Tensor, op: int) -> None:
    """Set a sparse COO tensor to the sum over all ranks, coalesced.

    Entries are added in the order of the ranks, half precision in float32 and rounded once.

    Args:
        algorithms: The group's.
        size: How many ranks.
        tensor: Of one shape, dtype and number of sparse dims on all ranks.
        op: The number of SUM.
    """
    own = tensor.detach().coalesce()
    dims = own.sparse_dim()
    checksum = zlib.crc32(array("q", [NUMBERS[own.dtype], dims, *own.shape]))
    count = torch.tensor([own._nnz()], dtype=torch.int64)
    counts = torch.empty(size, dtype=torch.int64)
    call = Call("all_reduce_sparse", count.dtype, 1, op, checksum=checksum)
    algorithms.exchange(call, [count], counts.split(1), shared=True)
    sizes: list[int] = counts.tolist()
    keys = _gather(algorithms, _keys(own), sizes)
    values = _gather(algorithms, own.values(), sizes)
    distinct, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    wide = torch.float32 if own.dtype in HALF else own.dtype
    total = torch.zeros((len(distinct), *own.shape[dims:]), dtype=wide)
    for where, entries in zip(inverse.split(sizes), values, strict=True):
        total.index_add_(0, where, entries.to(wide))
    indices = torch.stack(torch.unravel_index(distinct, own.shape[:dims]))
    result = torch.sparse_coo_tensor(
        indices, total.to(own.dtype), own.shape, is_coalesced=True, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(result)


def _keys(own: Tensor) -> Tensor:
    """The flat index of each entry in the sparse dims."""
    keys = torch.zeros(own._nnz(), dtype=torch.int64)
    for length, index in zip(own.shape, own.indices(), strict=False):  # its sparse dims alone
        keys.mul_(length).add_(index)
    return keys


def _gather(algorithms: Algorithms, own: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """all_gather of tensors whose numbers of rows differ."""
    flat = own.contiguous().view(-1)
    each = [torch.empty((count, *own.shape[1:]), dtype=own.dtype) for count in rows]
    flats = [tensor.view(-1) for tensor in each]
    algorithms.exchange_blocks("all_gather", [flat], flats, shared=True)
    return each
