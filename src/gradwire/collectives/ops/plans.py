"""Plans of all linear collectives, each with its adjoint.

    all_reduce ↔ all_reduce        all_gather ↔ reduce_scatter     broadcast ↔ reduce
    vary ↔ psum_invariant          gather ↔ scatter                all_to_all ↔ all_to_all
    ppermute ↔ ppermute            send_recv ↔ send_recv           barrier ↔ barrier

The fields of a plan are the arguments of its collective besides the tensor; ranks are ranks in the
group. With `average`, the results of a plan and of its adjoint are divided by the number of ranks.
A plan that sums avoids overflow of the sum; a plan that only moves values divides the result.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.collectives import wire
from gradwire.collectives.autograd.linear_collective import (
    LinearCollective,
    apply_linear,
    register_plan,
)
from gradwire.collectives.wire import Pending
from gradwire.collectives.wire.backends import contiguous_copy


class ReductionCollective(LinearCollective):
    """Plan of a collective that sums or averages, and supports other reductions."""

    average: bool

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start the sum or the average."""
        return self.start_reduction(x, _op(self.average), blocking)

    @abstractmethod
    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        """Start with another reduction."""

    def full_result(self, y: Tensor) -> Tensor:
        """Return the reduction over all ranks on every rank, given this rank's result."""
        return apply_linear(self.adjoint(), y)


@register_plan
@dataclass(frozen=True)
class AllReduce(ReductionCollective):
    """Sum or average, on every rank."""

    average: bool = False
    name = "all_reduce"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.all_reduce(x, op, self.group, blocking)

    def full_result(self, y: Tensor) -> Tensor:
        return y

    def adjoint(self) -> AllReduce:
        return self


@register_plan
@dataclass(frozen=True)
class Invariant(LinearCollective):
    """Sum or average that all ranks use in the same way, so that backward sends nothing."""

    average: bool = False
    name = "psum_invariant"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.all_reduce(x, _op(self.average), self.group, blocking)

    def adjoint(self) -> Vary:
        return Vary(self.group, self.average)


@register_plan
@dataclass(frozen=True)
class Vary(LinearCollective):
    """Identity on a value that is equal on all ranks, and used differently on each."""

    average: bool = False
    name = "vary"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return _divided(self, wire.done(contiguous_copy(x)))

    def adjoint(self) -> Invariant:
        return Invariant(self.group, self.average)


@register_plan
@dataclass(frozen=True)
class Broadcast(LinearCollective):
    """Root's tensor on every rank; inputs of other ranks are not read."""

    root: int
    average: bool = False
    name = "broadcast"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return _divided(self, wire.broadcast(x, self.root, self.group, blocking))

    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, self.average)


@register_plan
@dataclass(frozen=True)
class Reduce(ReductionCollective):
    """Sum or average on the root, zeros on other ranks."""

    root: int
    average: bool = False
    name = "reduce"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.reduce(x, self.root, op, self.group, blocking)

    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.average)


@register_plan
@dataclass(frozen=True)
class AllGather(LinearCollective):
    """Rows of all ranks, on every rank."""

    sizes: tuple[int, ...] | None = None
    average: bool = False
    name = "all_gather"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return _divided(self, wire.all_gather(x, self.sizes, self.group, blocking))

    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.sizes, self.average)

    def rows(self, rows: int) -> int:
        return rows * self.group.size() if self.sizes is None else sum(self.sizes)


@register_plan
@dataclass(frozen=True)
class ReduceScatter(ReductionCollective):
    """Sum or average, whose rows are scattered."""

    sizes: tuple[int, ...] | None = None
    average: bool = False
    name = "reduce_scatter"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.reduce_scatter(x, self.sizes, op, self.group, blocking)

    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.sizes, self.average)

    def rows(self, rows: int) -> int:
        return rows // self.group.size() if self.sizes is None else self.sizes[self.group.rank()]


@register_plan
@dataclass(frozen=True)
class Gather(LinearCollective):
    """Rows of all ranks on the root, `other_rows` rows of zeros on other ranks."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "gather"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.gather(x, self.root, self.sizes, self.other_rows, self.group, blocking)

    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.root, self.sizes, self.other_rows)

    def rows(self, rows: int) -> int:
        return sum(self.sizes) if self.group.rank() == self.root else self.other_rows


@register_plan
@dataclass(frozen=True)
class Scatter(LinearCollective):
    """Root's rows, scattered; inputs of other ranks, of `other_rows` rows, are not read."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "scatter"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.scatter(x, self.root, self.sizes, self.group, blocking)

    def adjoint(self) -> Gather:
        return Gather(self.group, self.root, self.sizes, self.other_rows)

    def rows(self, rows: int) -> int:
        return self.sizes[self.group.rank()]


@register_plan
@dataclass(frozen=True)
class AllToAll(LinearCollective):
    """Exchange of rows between all ranks; equal numbers if the splits are None.

    Both splits are given, or neither. Without splits, the result has as many rows as the input.
    """

    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    name = "all_to_all"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.all_to_all(x, self.input_splits, self.output_splits, self.group, blocking)

    def adjoint(self) -> AllToAll:
        return AllToAll(self.group, self.output_splits, self.input_splits)

    def rows(self, rows: int) -> int:
        return rows if self.output_splits is None else sum(self.output_splits)


@register_plan
@dataclass(frozen=True)
class Permute(LinearCollective):
    """Tensors sent along (source, destination) pairs; zeros on ranks that receive nothing."""

    pairs: tuple[tuple[int, int], ...]
    name = "ppermute"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        if x.numel() == 0:
            return wire.done(contiguous_copy(x))
        rank, world = self.group.rank(), self.group.size()
        send, receive = [0] * world, [0] * world
        for source, destination in self.pairs:
            if source == rank:
                send[destination] = 1
            if destination == rank:
                receive[source] = 1
        row = x.unsqueeze(0)
        pending = wire.all_to_all(row[: sum(send)], send, receive, self.group, blocking)

        def finish() -> Tensor:
            rows = pending.wait()
            if len(rows):
                # `.data`, because a view could not be modified in place: autograd does not know its
                # base.
                return rows[0].data
            return _zeros_like(x)

        return Pending((), finish)

    def adjoint(self) -> Permute:
        pairs = tuple((destination, source) for source, destination in self.pairs)
        return Permute(self.group, pairs)


@register_plan
@dataclass(frozen=True)
class SendReceive(LinearCollective):
    """Tensor sent to one rank, and one received from another; zeros if there is no source."""

    destination: int | None
    source: int | None
    name = "send_recv"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        sent = None if self.destination is None else wire.send(x, self.destination, self.group)
        received = None if self.source is None else wire.receive(x, self.source, self.group)

        def finish() -> Tensor:
            result = _zeros_like(x) if received is None else received.wait()
            if sent is not None:
                sent.wait()
            return result

        return Pending((), finish)

    def adjoint(self) -> SendReceive:
        return SendReceive(self.group, self.source, self.destination)


@register_plan
class Barrier(LinearCollective):
    """Identity that waits for all ranks in both passes."""

    name = "barrier"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        wire.barrier(self.group)
        return wire.done(contiguous_copy(x))

    def adjoint(self) -> Barrier:
        return self


def _op(average: bool) -> str:
    return "avg" if average else "sum"


def _divided(plan: Broadcast | AllGather | Vary, moved: Pending) -> Pending:
    """Divide the result of a plan that only moves values, for an average."""
    if not plan.average:
        return moved

    return Pending((), lambda: moved.wait().div_(plan.group.size()))


def _zeros_like(x: Tensor) -> Tensor:
    """Return contiguous zeros as a plain tensor, also for a tensor subclass."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
