"""Operations of a group that reduce: all_reduce, reduce and reduce_scatter, in all forms."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from gradwire.errors import ArgumentError
from gradwire.shm.algorithms.arithmetic import HALF, SUM, check_reduction, number_of
from gradwire.shm.group.group import Group, State, check_root, kept
from gradwire.shm.group.record import UNOBSERVED
from gradwire.shm.memory.copying import may_overlap
from gradwire.shm.memory.header import NUMBERS, Call
from gradwire.shm.memory.tensors import (
    check_parts,
    check_results,
    check_sparse,
    check_transfer,
    checksum_of,
    common_base,
    equal_parts,
    flat_of,
    is_ordinary,
    one_each,
    only,
    paired,
    write_back,
)


class Reductions:
    """Operations of a group that reduce."""

    _group: Group

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Set every rank's tensors to the reduction over all ranks; sparse ones to the sum."""
        group, opts = self._group, opts or AllreduceOptions()
        if len(tensors) == 1 and is_ordinary(tensors[0]):
            number = number_of(opts.reduceOp.op)
            known = group.known
            if known is not None and (call := known.find(tensors[0], number)) is not None:
                return group.submit_known(call, tensors, opts, number)
        if tensors and getattr(tensors[0], "layout", None) is torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        return self._reduce("all_reduce", tensors, opts)

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Set every rank's sparse COO tensor to the sum over all ranks, coalesced.

        Raises:
            ArgumentError: The reduce op is not SUM, or the tensor is not in COO layout.
        """
        group = self._group
        opts, tensor = opts or AllreduceOptions(), only(tensors)
        op = number_of(opts.reduceOp.op)
        check_sparse(tensor)
        check_reduction(op, tensor.dtype)
        if op != SUM:
            raise ArgumentError("sparse tensors support only SUM: pass to_dense()")

        def job() -> None:
            _all_reduce_sparse(group.state, group.size, tensor, op)

        observed = ("allreduce_", 0, op, [tensors])
        return group.submit(job, tensors, opts, observed, op="all_reduce")

    allreduce_coalesced = allreduce  # a list is one operation

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions | None = None) -> Work:
        """Set the root's tensor to the reduction; other ranks' tensors keep their values."""
        opts = opts or ReduceOptions()
        return self._reduce("reduce", tensors, opts, check_root(opts.rootRank, self._group.size))

    def _reduce(self, kind: str, tensors: list[Tensor], opts: Any, root: int = -1) -> Work:
        group = self._group
        op = number_of(opts.reduceOp.op)
        check_results(tensors)
        for tensor in tensors:
            check_reduction(op, tensor.dtype)
        checksum, filled = checksum_of(tensors), kept(tensors, opts)

        def job() -> None:
            flats: Iterable[Tensor] = map(flat_of, filled)
            if may_overlap(filled):  # reduce the values from before the call
                flats = [flat.clone() for flat in flats]
            for tensor, flat in zip(filled, flats, strict=True):
                call = Call(kind, flat.dtype, flat.numel(), op, root, checksum=checksum)
                group.state.reduce(call, flat)
                if root in (-1, group.rank):
                    write_back(tensor, flat)

        observed = ("allreduce_" if root < 0 else "reduce_", max(root, 0), op, [tensors])
        return group.submit(job, tensors, opts, observed, op=kind)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Set each rank's output to the reduction of its entries in all ranks' lists."""
        group, opts = self._group, opts or ReduceScatterOptions()
        output, blocks = only(outputs), one_each(only(inputs), group.size, "input_list")
        op = self._check_reduce_scatter(output, blocks, opts)
        sends = tuple(block.numel() for block in blocks)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            out = only(results)
            call = Call("reduce_scatter", out.dtype, 0, op, -1, sends, (out.numel(),) * group.size)
            group.state.reduce_scatter(call, flats, out, base=common_base(flats))

        return group.submit_into(outputs, fill, opts, "reduce_scatter", blocks)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Run `reduce_scatter` on the equal parts of a tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Run `reduce_scatter_single` for several tensors in one operation."""
        group, opts = self._group, opts or ReduceScatterOptions()
        for output, source in paired(outputs, inputs):
            op = self._check_reduce_scatter(output, [source], opts)
            check_parts(whole=source, part=output, size=group.size)
        checksum = checksum_of(outputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            for out, flat in zip(results, flats, strict=True):
                call = Call("reduce_scatter_single", out.dtype, out.numel(), op, checksum=checksum)
                blocks = equal_parts(flat, group.size)
                group.state.reduce_scatter(call, blocks, out, base=flat)

        observed = UNOBSERVED
        if len(outputs) == 1:
            observed = ("_reduce_scatter_base_", 0, op, [outputs, inputs])
        return group.submit_into(outputs, fill, opts, "reduce_scatter_single", inputs, observed)

    def _check_reduce_scatter(self, output: Tensor, blocks: list[Tensor], opts: Any) -> int:
        op = number_of(opts.reduceOp.op)
        check_transfer(blocks, [output])
        check_reduction(op, output.dtype)
        return op


def _all_reduce_sparse(state: State, size: int, tensor: Tensor, op: int) -> None:
    """Set a sparse COO tensor to the sum over all ranks, coalesced.

    The ranks exchange their entries, and each adds all of them up in rank order. Half precision is
    accumulated in float32 and rounded once.

    Args:
        state: State of the group.
        size: Number of ranks.
        tensor: Tensor with equal shape, dtype and number of sparse dims on all ranks.
        op: Number of SUM.
    """
    own = tensor.detach().coalesce()
    dims = own.sparse_dim()
    checksum = zlib.crc32(array("q", [NUMBERS[own.dtype], dims, *own.shape]))
    count = torch.tensor([own._nnz()], dtype=torch.int64)
    counts = torch.empty(size, dtype=torch.int64)
    call = Call("all_reduce_sparse", count.dtype, 1, op, checksum=checksum)
    state.exchange(call, [count], counts.split(1), shared=True)
    sizes: list[int] = counts.tolist()
    keys = _gather(state, _keys(own), sizes)
    values = _gather(state, own.values(), sizes)
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
    """Return the flat index of each entry in the sparse dims."""
    keys = torch.zeros(own._nnz(), dtype=torch.int64)
    for length, index in zip(own.shape, own.indices(), strict=False):  # the sparse dims only
        keys.mul_(length).add_(index)
    return keys


def _gather(state: State, own: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Gather tensors whose numbers of rows differ."""
    flat = own.contiguous().view(-1)
    each = [torch.empty((count, *own.shape[1:]), dtype=own.dtype) for count in rows]
    flats = [tensor.view(-1) for tensor in each]
    state.exchange_blocks("all_gather", [flat], flats, shared=True)
    return each
