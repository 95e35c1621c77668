"""All operations of a group, as torch.distributed calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from gradwire._torch import outside_graphs
from gradwire.errors import ArgumentError
from gradwire.shm.header import NUMBERS, Call
from gradwire.shm.reduction import HALF, SUM, check_reduction, number_of
from gradwire.shm.shm_group import UNOBSERVED, Group, State, kept
from gradwire.shm.tensors import (
    check_parts,
    check_results,
    check_tensors,
    check_transfer,
    checksum,
    checksum_of,
    common_base,
    equal_parts,
    flat_of,
    is_ordinary,
    may_overlap,
    one_each,
    only,
    paired,
    row_counts,
    write_all_back,
    write_back,
)

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"


def _awaited(value: Any) -> Any:
    """Return a tensor, or nested lists of tensors, after waiting for pending results."""
    if isinstance(value, list):
        new = [_awaited(v) for v in value]
        return value if all(n is v for n, v in zip(new, value, strict=True)) else new
    return value.trigger_wait() if hasattr(value, "trigger_wait") else value


def _awaiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operation accept pending results of functional collectives."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ArgumentError:  # raised before anything is sent: a pending result has no memory
            awaited = [_awaited(arg) for arg in args]
            if all(new is old for new, old in zip(awaited, args, strict=True)):
                raise
        return method(self, *awaited, **kwargs)

    return call


def _with_awaited_tensors(cls: type[Any]) -> type[Any]:
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") or name.endswith("_base"):
            setattr(cls, name, _awaiting(method))
    return cls


@outside_graphs
@_with_awaited_tensors
class Operations(Group):
    """All operations of a group."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Set every rank's tensors to the reduction over all ranks; sparse ones to the sum."""
        opts = opts or AllreduceOptions()
        if len(tensors) == 1 and is_ordinary(tensors[0]):
            number = number_of(opts.reduceOp.op)
            known = self.known
            if known is not None and (call := known.find(tensors[0], number)) is not None:
                return self.submit_known(call, tensors, opts, number)
        if tensors and getattr(tensors[0], "layout", None) is torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        return self._reduce("all_reduce", tensors, opts)

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Set every rank's sparse COO tensor to the sum over all ranks, coalesced."""
        opts, tensor = opts or AllreduceOptions(), only(tensors)
        op = number_of(opts.reduceOp.op)
        if getattr(tensor, "layout", None) is not torch.sparse_coo or not tensor.sparse_dim():
            raise ArgumentError("allreduce_sparse takes a tensor in COO layout with a sparse dim")
        check_tensors([tensor.detach()._values()])
        check_reduction(op, tensor.dtype)
        if op != SUM:
            raise ArgumentError("sparse tensors support only SUM: pass to_dense()")

        def job() -> None:
            _all_reduce_sparse(self.state, self.state.size, tensor, op)

        observed = ("allreduce_", 0, op, [tensors])
        return self.submit(job, tensors, opts, observed, op="all_reduce")

    allreduce_coalesced = allreduce  # a list is one operation

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions | None = None) -> Work:
        """Set the root's tensor to the reduction; other ranks' tensors keep their values."""
        opts = opts or ReduceOptions()
        return self._reduce("reduce", tensors, opts, self._root(opts.rootRank))

    def _reduce(self, kind: str, tensors: list[Tensor], opts: Any, root: int = -1) -> Work:
        op = number_of(opts.reduceOp.op)
        check_results(tensors)
        for tensor in tensors:
            check_reduction(op, tensor.dtype)
        number, filled = checksum_of(tensors), kept(tensors, opts)

        def job() -> None:
            flats: Iterable[Tensor] = map(flat_of, filled)
            if may_overlap(filled):  # reduce the values from before the call
                flats = [flat.clone() for flat in flats]
            for tensor, flat in zip(filled, flats, strict=True):
                call = Call(kind, flat.dtype, flat.numel(), op, root, checksum=number)
                self.state.reduce(call, flat)
                if root in (-1, self.state.rank):
                    write_back(tensor, flat)

        observed = ("allreduce_" if root < 0 else "reduce_", max(root, 0), op, [tensors])
        return self.submit(job, tensors, opts, observed, op=kind)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Set each rank's output to the reduction of its entries in all ranks' lists."""
        opts = opts or ReduceScatterOptions()
        output, blocks = only(outputs), one_each(only(inputs), self.state.size, "input_list")
        op = self._check_reduce_scatter(output, blocks, opts)
        sends = tuple(block.numel() for block in blocks)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            out = only(results)
            receives = (out.numel(),) * self.state.size
            call = Call("reduce_scatter", out.dtype, 0, op, -1, sends, receives)
            self.state.reduce_scatter(call, flats, out, base=common_base(flats))

        return self.submit_into(outputs, fill, opts, "reduce_scatter", blocks)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Run `reduce_scatter` on the equal parts of a tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Run `reduce_scatter_single` for several tensors in one operation."""
        opts = opts or ReduceScatterOptions()
        for output, source in paired(outputs, inputs):
            op = self._check_reduce_scatter(output, [source], opts)
            check_parts(whole=source, part=output, size=self.state.size)
        number = checksum_of(outputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            for out, flat in zip(results, flats, strict=True):
                call = Call("reduce_scatter_single", out.dtype, out.numel(), op, checksum=number)
                blocks = equal_parts(flat, self.state.size)
                self.state.reduce_scatter(call, blocks, out, base=flat)

        one = "_reduce_scatter_base_", 0, op, [outputs, inputs]
        observed = one if len(outputs) == 1 else UNOBSERVED
        return self.submit_into(outputs, fill, opts, "reduce_scatter_single", inputs, observed)

    def _check_reduce_scatter(self, output: Tensor, blocks: list[Tensor], opts: Any) -> int:
        op = number_of(opts.reduceOp.op)
        check_transfer(blocks, [output])
        check_reduction(op, output.dtype)
        return op

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions | None = None) -> Work:
        """Copy the root's tensors to every rank's, in one operation."""
        opts = opts or BroadcastOptions()
        root = self._root(opts.rootRank)
        check_results(tensors)  # on the root as well: a mistake on all ranks is an error on all
        filled = kept(tensors, opts)

        def job() -> None:
            flats = [flat_of(tensor) for tensor in filled]
            if len(flats) == 1:
                call = Call("broadcast", flats[0].dtype, flats[0].numel(), -1, root)
                self.state.broadcast(call, flats[0])
            else:
                self.state.broadcast_list(flats, root)
            if root != self.state.rank:
                write_all_back(filled, flats)

        observed = ("broadcast_", root, 0, [tensors])
        return self.submit(job, tensors, opts, observed, op="broadcast")

    def allgather(
        self,
        output_lists: list[list[Tensor]],
        inputs: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Fill every rank's list with all ranks' tensors, whose sizes may differ."""
        # Several lists, with as many inputs, are gathered in one operation.
        opts = opts or AllgatherOptions()
        for outputs, source in paired(output_lists, inputs):
            check_transfer([source], one_each(outputs, self.state.size, "tensor_list"))
        filled = [kept(outputs, opts) for outputs in output_lists]
        read = kept(inputs, opts)

        def job() -> None:
            for outputs, source in zip(filled, read, strict=True):
                flat, into = flat_of(source), [flat_of(output) for output in outputs]
                self.state.exchange_blocks("all_gather", [flat], into, base=flat, shared=True)
                write_all_back(outputs, into)

        everything = [output for outputs in output_lists for output in outputs]
        observed = ("allgather_", 0, 0, [everything, inputs])
        return self.submit(job, everything, opts, observed, op="all_gather", sources=inputs)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Run `allgather` into the equal parts of one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Run `all_gather_single` for several tensors in one operation."""
        for output, source in paired(outputs, inputs):
            check_transfer([source], [output])
            check_parts(whole=output, part=source, size=self.state.size)
        number = checksum_of(inputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            for into, flat in zip(results, flats, strict=True):
                parts = equal_parts(into, self.state.size)
                call = Call("all_gather_single", flat.dtype, flat.numel(), checksum=number)
                self.state.exchange(call, [flat], parts, base=flat, shared=True)

        opts = opts or AllgatherOptions()
        one = "_allgather_base_", 0, 0, [outputs, inputs]
        observed = one if len(outputs) == 1 else UNOBSERVED
        return self.submit_into(outputs, fill, opts, "all_gather_single", inputs, observed)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None
    ) -> Work:
        """Fill the root's list with all ranks' tensors, whose sizes may differ."""
        opts = opts or GatherOptions()
        root, source = self._root(opts.rootRank), only(inputs)
        into: list[Tensor] = []
        if root == self.state.rank:
            into = one_each(only(outputs), self.state.size, "gather_list")
        check_transfer([source], into)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            self.state.gather(root, only(flats), results)

        return self.submit_into(into, fill, opts, "gather", inputs)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ScatterOptions | None = None
    ) -> Work:
        """Fill every rank's tensor with its entry of the root's list, whose sizes may differ."""
        opts = opts or ScatterOptions()
        root, output = self._root(opts.rootRank), only(outputs)
        blocks: list[Tensor] = []
        if root == self.state.rank:
            blocks = one_each(only(inputs), self.state.size, "scatter_list")
        check_transfer(blocks, [output])

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            self.state.scatter(root, flats, results[0])

        return self.submit_into(outputs, fill, opts, "scatter", blocks)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        """Fill entry i of a rank's outputs with rank i's entry for it; sizes may differ."""
        one_each(outputs, self.state.size, "output_tensor_list")
        check_transfer(one_each(inputs, self.state.size, "input_tensor_list"), outputs)

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            self.state.exchange_blocks("all_to_all", flats, results)

        opts = opts or AllToAllOptions()
        return self.submit_into(outputs, fill, opts, "all_to_all", inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Run `alltoall` between parts of two tensors, equal or of the given numbers of rows."""
        check_transfer([input], [output])
        receives = row_counts(output, output_split_sizes, self.state.size, "output_split_sizes")
        sends = row_counts(input, input_split_sizes, self.state.size, "input_split_sizes")

        def fill(results: list[Tensor], flats: list[Tensor]) -> None:
            flat = only(flats)
            blocks, into = flat.split(sends), results[0].split(receives)
            self.state.exchange_blocks("all_to_all", blocks, into, base=flat)

        opts = opts or AllToAllOptions()
        equal = "alltoall_base_", 0, 0, [[output], [input]]
        observed = equal if len({*sends, *receives}) == 1 else UNOBSERVED  # on all ranks
        return self.submit_into([output], fill, opts, "all_to_all_single", [input], observed)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Wait for every rank; the handle is done once all have called it."""
        opts = opts or BarrierOptions()
        return self.submit(self.state.barrier, [], opts, op="barrier")

    def monitored_barrier(
        self, opts: BarrierOptions | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it."""
        opts = opts or BarrierOptions()

        def job() -> None:
            self.state.barrier("monitored_barrier")

        self.submit(job, [], opts, op="barrier").wait()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor; between hosts, it must not change until the handle was waited for."""
        self._check_peer(dst, "dst")
        return self.messages.send(self, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from rank `src`."""
        self._check_peer(src, "src")
        return self.messages.receive(self, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from any rank."""
        self.check_usable()
        return self.messages.receive(self, tensors, None, tag)

    # names in torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "shm"

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of submitted collectives, equal on ranks that are in step."""
        return self.submitted

    def _root(self, root: int) -> int:
        """Return the rank of a root, which must be in the group."""
        if not 0 <= root < self.state.size:
            raise ArgumentError(f"root is rank {root}: give a rank from 0 to {self.state.size - 1}")
        return root

    def _check_peer(self, peer: int, name: str) -> None:
        """Raise unless the group is usable and a peer is another rank of it."""
        rank, size = self.state.rank, self.state.size
        if not 0 <= peer < size or peer == rank:
            raise ArgumentError(
                f"{name} is rank {peer}: give another rank of the group than this one "
                f"({rank}), from 0 to {size - 1}"
            )
        self.check_usable()


def _all_reduce_sparse(state: State, size: int, tensor: Tensor, op: int) -> None:
    """Set a sparse COO tensor to the sum over all ranks, coalesced."""
    # The ranks exchange their entries, and each adds all of them up in rank order. Half precision
    # is accumulated in float32 and rounded once.
    own = tensor.detach().coalesce()
    dims = own.sparse_dim()
    described = checksum([NUMBERS[own.dtype], dims, *own.shape])
    count = torch.tensor([own._nnz()], dtype=torch.int64)
    counts = torch.empty(size, dtype=torch.int64)
    call = Call("all_reduce_sparse", count.dtype, 1, op, checksum=described)
    state.exchange(call, [count], counts.split(1), shared=True)
    sizes: list[int] = counts.tolist()
    own_keys = torch.zeros(own._nnz(), dtype=torch.int64)  # flat indices in the sparse dims
    for length, index in zip(own.shape, own.indices(), strict=False):  # the sparse dims only
        own_keys.mul_(length).add_(index)
    keys = _gather(state, own_keys, sizes)
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


def _gather(state: State, own: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Gather tensors whose numbers of rows differ."""
    flat = own.contiguous().view(-1)
    each = [torch.empty((count, *own.shape[1:]), dtype=own.dtype) for count in rows]
    flats = [tensor.view(-1) for tensor in each]
    state.exchange_blocks("all_gather", [flat], flats, shared=True)
    return each
