"""Gradients of shards, reduced in one tree over the members, so that the bits never change.

Each shard's gradients are copied into flat tensors, one per dtype, and added to those of the shards
on their left as far as both are on this member (`tree`). The rest is sent once: each member gets a
slice of the subtrees of all members, finishes the tree for its slice, and all gather the slices. If
each member has one subtree, an all-reduce sends the same amount.

Flat tensors have at least single precision: sums and weights would overflow float16, and bfloat16
would round them. Their elements are in row-major order, whatever strides the parameters have on
each member.

Buffers that forward changes, such as running statistics, are reduced as well: every shard begins
with their values at the beginning of the step; floating-point buffers become the mean over shards,
others the maximum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.elastic.members import Wait
from gradwire.elastic.training.columns import (
    Column,
    add_to_left,
    as_bytes,
    as_gradient,
    by_slice,
    by_sum_dtype,
    divide,
    gradient_dtype,
    larger_to_left,
    splits,
)
from gradwire.elastic.training.state import State
from gradwire.elastic.training.tree import Node, add_up, nodes_of, push
from gradwire.errors import NotSupportedError, ReductionError


class Contribution(NamedTuple):
    """Result of one shard.

    Args:
        flats: Weighted gradients, and buffers, in the flat memory of each column.
        weight: Weight of the shard.
        used: 1 for each parameter that has a gradient.
        changed: 1 for each buffer that forward has changed.
    """

    flats: list[Tensor]
    weight: float
    used: Tensor
    changed: Tensor


class Notes(NamedTuple):
    """Values that members send with a step, besides sums.

    Args:
        stop: True if any member asks to stop after this step.
        seconds: Time of each member for a shard.
        digests: Digest of each member's parameters; empty if they were not compared.
    """

    stop: bool
    seconds: list[float]
    digests: list[bytes]


class TreeSum:
    """Reduction of one step after the other, for one generation.

    Args:
        state: Models, with the same parameters, buffers and frozen parameters on every member.
        shards: Number of shards of a step.
        group: Group of the members.
        wait: Function that waits for their collectives.
        assigned: Shards of each member, in ascending order.

    Attributes:
        known: Ids of the trained parameters.
    """

    def __init__(
        self,
        state: State,
        shards: int,
        group: ProcessGroup,
        wait: Wait,
        assigned: Sequence[Sequence[int]],
    ) -> None:
        self._state, self._trained = state, [p.requires_grad for p in state.parameters]
        self._parameters = [p for p in state.parameters if p.requires_grad]
        self.known = {id(p) for p in self._parameters}
        self._shards, self._group, self._wait = shards, group, wait
        self._columns: list[tuple[Column, list[int]]] = []  # with indices into parameters
        self._buffer_columns: list[tuple[Column, list[int]]] = []  # with indices into buffers
        for dtype, indices in by_sum_dtype([gradient_dtype(p) for p in self._parameters]):
            like = [self._parameters[i].detach() for i in indices]
            self._columns.append((Column(dtype, like, add_to_left, group.size()), indices))
        found = state.buffers()
        for dtype, indices in by_sum_dtype([b.dtype for b in found]):
            add = add_to_left if dtype.is_floating_point or dtype.is_complex else larger_to_left
            column = Column(dtype, [found[i] for i in indices], add, group.size())
            self._buffer_columns.append((column, indices))
        self._pending: list[list[tuple[Node, Tensor]]] = []
        self.assign(assigned)
        self.clear()

    def assign(self, assigned: Sequence[Sequence[int]]) -> None:
        """Set the shards of each member for the steps that follow."""
        self._own = assigned[self._group.rank()]
        self._nodes = [nodes_of(shards) for shards in assigned]
        for column in self._all_columns:
            column.received = None

    @property
    def _all_columns(self) -> list[Column]:
        return [column for column, _ in (*self._columns, *self._buffer_columns)]

    def fits(self) -> bool:
        """Return True if the same parameters are trained as at construction."""
        return self._trained == [p.requires_grad for p in self._state.parameters]

    def clear(self) -> None:
        """Reset for a new step."""
        columns = self._all_columns
        for column, pending in zip(columns, self._pending, strict=False):
            for _, flat in pending:
                column.give(flat)
        self._pending = [[] for _ in columns]
        self._weights = torch.zeros(self._shards, dtype=torch.float64)
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._changed = torch.zeros(sum(len(i) for _, i in self._buffer_columns), dtype=torch.uint8)
        self._missing = deque(self._own)

    def collect(self, weight: float, *, apart: bool) -> Contribution:
        """Take the gradients of a shard's mean, multiplied by the shard's weight.

        Args:
            weight: Weight of the shard.
            apart: True if the result is used without those of this member's previous shards.

        Raises:
            NotSupportedError: A gradient is sparse.
        """
        used = torch.zeros_like(self._used)
        flats = []
        for column, indices in self._columns:
            flat = column.take()
            self._copy_gradients(column.views(flat), indices, used)
            if weight != 1:
                flat.mul_(weight)
            flats.append(flat)
        changed = torch.zeros_like(self._changed) if apart else self._changed.clone()
        buffers = self._look_at_buffers(changed)
        for column, indices in self._buffer_columns:
            flat = column.take()
            torch._foreach_copy_(column.views(flat), [buffers[i] for i in indices])
            flats.append(flat)
        return Contribution(flats, weight, used, changed)

    def copy_of(self, contribution: Contribution) -> Contribution:
        """Return a copy, in memory that fits the number of members."""
        flats = []
        for column, flat in zip(self._all_columns, contribution.flats, strict=True):
            flats.append(column.take())
            flats[-1][: column.numel].copy_(flat[: column.numel])
        return contribution._replace(flats=flats)

    def gather_held(self, own: Iterable[int]) -> list[list[int]]:
        """Return the shards whose results each member holds."""
        mine = torch.zeros(self._shards, dtype=torch.uint8)
        mine[list(own)] = 1
        gathered = torch.empty(self._group.size() * self._shards, dtype=torch.uint8)
        self._wait(getattr(self._group, ALL_GATHER_SINGLE)(gathered, mine))
        return [row.nonzero().flatten().tolist() for row in gathered.view(-1, self._shards)]

    def add(self, shard: int, contribution: Contribution) -> None:
        """Add the result of a shard, whose memory is then reused.

        Raises:
            ReductionError: The shard is not the next one of this member.
        """
        if not self._missing or shard != self._missing[0]:
            expected = self._missing[0] if self._missing else "none"
            raise ReductionError(f"backward of shard {shard}: expected shard {expected}")
        self._missing.popleft()
        self._weights[shard] = contribution.weight
        self._used |= contribution.used
        self._changed |= contribution.changed
        columns = zip(self._pending, contribution.flats, self._all_columns, strict=True)
        for pending, flat, column in columns:
            push(pending, (shard, 1), flat, column.merge)

    def _look_at_buffers(self, changed: Tensor) -> list[Tensor]:
        """Return the buffers, and note which ones a shard has changed."""
        buffers, first = self._state.buffers(), self._state.first_buffers
        if [b.shape for b in buffers] != [f.shape for f in first]:
            before, after = ([tuple(b.shape) for b in all_] for all_ in (first, buffers))
            raise NotSupportedError(
                f"forward has changed the shapes of buffers from {before} to {after}: allocate "
                "them with their final shapes before run.steps"
            )
        known = changed.tolist()
        for index, (buffer, value) in enumerate(zip(buffers, first, strict=True)):
            if not known[index] and not torch.equal(buffer, value):
                changed[index] = 1
        return buffers

    def _copy_gradients(
        self, views: Sequence[Tensor], indices: Sequence[int], used: Tensor
    ) -> None:
        targets, sources = [], []
        for view, index in zip(views, indices, strict=True):
            parameter = self._parameters[index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout != torch.strided:
                raise NotSupportedError(
                    "reproducible=True does not support sparse gradients: use dense ones, or "
                    "elastic.join(reproducible=False)"
                )
            used[index] = 1
            targets.append(view)
            sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def reduce(
        self, stop: bool, seconds: float, digest: bytes
    ) -> tuple[list[tuple[Tensor, Tensor]], Notes]:
        """Set the gradients of all members to the mean over all samples.

        The gradients have the strides of their parameters, because optimizers with `fused=True`
        read both in the order of memory. The next step may overwrite their memory.

        Args:
            stop: True if this member asks to stop after this step.
            seconds: Time of this member for a shard.
            digest: Digest of its parameters, or no bytes; of one length on all members.

        Returns:
            Buffers with their new values, and the notes of all members.

        Raises:
            DistributedError: A member is lost.
            ReductionError: A shard of this member had no backward.
        """
        if self._missing:
            raise ReductionError(f"shard {self._missing[0]} of this step had no backward")
        slices = [self._sum_slice(number, c) for number, c in enumerate(self._all_columns)]
        notes = self._gather_notes(stop, seconds, digest)
        total = float(self._weights.sum())
        used, later = self._used.tolist(), slices[len(self._columns) :]
        for (column, indices), part in zip(self._columns, slices, strict=False):
            flat = self._gather(column, divide(part, total))
            for view, index in zip(column.views(flat), indices, strict=True):
                parameter = self._parameters[index]
                parameter.grad = as_gradient(view, parameter) if used[index] else None
        changed: list[tuple[Tensor, Tensor]] = []
        buffers, first = self._state.buffers(), self._state.first_buffers
        by_shards = self._changed.tolist()
        for (column, indices), part in zip(self._buffer_columns, later, strict=True):
            flat = self._gather(column, divide(part, self._shards if column.averaged else 1))
            for index, value in zip(indices, column.views(flat), strict=True):
                # summing masks that hold the largest float would give infinity
                changed.append((buffers[index], value if by_shards[index] else first[index]))
        return changed, notes

    def _sum_slice(self, number: int, column: Column) -> Tensor:
        """Return this member's slice of the sum over all shards."""
        rank, size, chunk = self._group.rank(), self._group.size(), column.chunk
        mine = [flat for _, flat in self._pending[number]]
        if size == 1:
            self._pending[number] = []  # it holds the gradients from now on
            return mine[0]
        # for each member, its slice of each node of this member
        sent = mine[0] if len(mine) == 1 else by_slice(mine, chunk, size, column.dtype)
        sizes = [len(of) * chunk for of in self._nodes]
        if column.received is None:
            column.received = torch.empty(sum(sizes), dtype=column.dtype)
            column.result = torch.empty(size * chunk, dtype=column.dtype)
        received = column.received
        exchange = getattr(self._group, ALL_TO_ALL_SINGLE)
        self._wait(exchange(as_bytes(received), as_bytes(sent), *splits(column, sizes, rank)))
        slices = received.view(-1, chunk).unbind()
        order = [node for of in self._nodes for node in of]
        return add_up(self._shards, dict(zip(order, slices, strict=True)), column.add)

    def _gather(self, column: Column, part: Tensor) -> Tensor:
        """Return the slices of all members; of a single member, its own memory."""
        if self._group.size() == 1:
            return part
        gather = getattr(self._group, ALL_GATHER_SINGLE)
        self._wait(gather(as_bytes(column.result), as_bytes(part)))
        return column.result

    def _gather_notes(self, stop: bool, seconds: float, digest: bytes) -> Notes:
        """Gather weights, used parameters and changed buffers of all shards, and the notes."""
        if self._group.size() == 1:
            return Notes(stop, [seconds], [digest])
        numbers = torch.cat([self._weights, torch.tensor([seconds], dtype=torch.float64)])
        flags = torch.cat([self._used, self._changed, torch.tensor([stop], dtype=torch.uint8)])
        parts = [numbers.view(torch.uint8), torch.tensor(list(digest), dtype=torch.uint8), flags]
        mine = torch.cat(parts)
        gathered = torch.empty(self._group.size() * mine.numel(), dtype=torch.uint8)
        self._wait(getattr(self._group, ALL_GATHER_SINGLE)(gathered, mine))
        rows = gathered.view(self._group.size(), -1).split([part.numel() for part in parts], dim=1)
        of_members = rows[0].clone().view(torch.float64)
        self._weights = of_members[:, :-1].sum(dim=0)  # 0 for the shards of others
        lengths = [len(self._used), len(self._changed), 1]
        self._used, self._changed, asked = rows[2].amax(dim=0).split(lengths)
        digests = [bytes(row) for row in rows[1].tolist()]
        return Notes(bool(asked), of_members[:, -1].tolist(), digests)
