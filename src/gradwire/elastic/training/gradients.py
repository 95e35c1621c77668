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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.buckets import memory_strides
from gradwire.elastic.members import Wait
from gradwire.elastic.training.samples import deal
from gradwire.elastic.training.state import State
from gradwire.elastic.training.tree import Node, add_up, nodes_within, push
from gradwire.errors import NotSupportedError, ReductionError


class _Column:
    """Tensors that are reduced in one dtype, contiguous in flat memory.

    Args:
        dtype: Dtype of the flat memory.
        like: The tensors.
        add: Function that writes the combination of two flat tensors to the first.
        width: Number of members, and of slices of the flat memory.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        like: Sequence[Tensor],
        add: Callable[[Tensor, Tensor], Tensor],
        width: int,
    ) -> None:
        self.add, self.width = add, width
        self.dtype, self.shapes = dtype, [t.shape for t in like]
        self.sizes = [t.numel() for t in like]
        self.numel = sum(self.sizes)
        self.chunk = -(-self.numel // width)
        self._spare: list[Tensor] = []
        # reused in each step, because new pages cost as much as the copies into them
        self.received: Tensor | None = None
        self.result = torch.empty(0, dtype=torch.float32)

    def take(self) -> Tensor:
        """Return flat memory with undefined values."""
        if self._spare:
            return self._spare.pop()
        flat = torch.empty(self.chunk * self.width, dtype=self.dtype)
        flat[self.numel :].zero_()
        return flat

    def give(self, flat: Tensor) -> None:
        """Return memory for reuse."""
        self._spare.append(flat)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of flat memory."""
        parts = flat[: self.numel].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        """Add the second tensor to the first, and reuse the memory of the second."""
        total = self.add(left, right)
        self.give(right)
        return total


class TreeSum:
    """Reduction of one step after the other, for one generation.

    Args:
        state: Models, with the same parameters, buffers and frozen parameters on every member.
        shards: Number of shards of a step.
        group: Group of the members.
        wait: Function that waits for their collectives.

    Attributes:
        known: Ids of the trained parameters.
    """

    def __init__(
        self,
        state: State,
        shards: int,
        group: ProcessGroup,
        wait: Wait,
    ) -> None:
        self._state, self._trained = state, [p.requires_grad for p in state.parameters]
        self._parameters = [p for p in state.parameters if p.requires_grad]
        self.known = {id(p) for p in self._parameters}
        self._shards, self._group, self._wait = shards, group, wait
        self._runs = deal(shards, group.size())
        self._columns: list[tuple[_Column, list[int]]] = []  # with indices into parameters
        self._buffer_columns: list[tuple[_Column, list[int]]] = []  # with indices into buffers
        for dtype, indices in _by_sum_dtype([_gradient_dtype(p) for p in self._parameters]):
            like = [self._parameters[i].detach() for i in indices]
            self._columns.append((_Column(dtype, like, _add, group.size()), indices))
        found = state.buffers()
        for dtype, indices in _by_sum_dtype([b.dtype for b in found]):
            add = _add if dtype.is_floating_point or dtype.is_complex else _largest
            column = _Column(dtype, [found[i] for i in indices], add, group.size())
            self._buffer_columns.append((column, indices))
        self._pending: list[list[tuple[Node, Tensor]]] = []
        self.clear()

    def fits(self) -> bool:
        """Return True if the same parameters are trained as at construction."""
        return self._trained == [p.requires_grad for p in self._state.parameters]

    def clear(self) -> None:
        """Reset for a new step."""
        columns = [column for column, _ in (*self._columns, *self._buffer_columns)]
        for column, pending in zip(columns, self._pending, strict=False):
            for _, flat in pending:
                column.give(flat)
        self._pending = [[] for _ in columns]
        self._weights = torch.zeros(self._shards, dtype=torch.float64)
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._changed = torch.zeros(sum(len(i) for _, i in self._buffer_columns), dtype=torch.uint8)
        self._next = self._runs[self._group.rank()].start

    def add_shard(self, shard: int, weight: float) -> None:
        """Take the gradients of a shard's mean, and multiply them by the shard's weight.

        Raises:
            ReductionError: The shard is not the next one of this member.
            NotSupportedError: A gradient is sparse.
        """
        if shard != self._next:
            raise ReductionError(f"backward of shard {shard}: expected shard {self._next}")
        self._next += 1
        self._weights[shard] = weight
        for number, (column, indices) in enumerate(self._columns):
            flat = column.take()
            self._copy_gradients(column.views(flat), indices)
            if weight != 1:
                flat.mul_(weight)
            push(self._pending[number], (shard, 1), flat, column.merge)
        buffers = self._look_at_buffers()
        for number, (column, indices) in enumerate(self._buffer_columns, len(self._columns)):
            flat = column.take()
            torch._foreach_copy_(column.views(flat), [buffers[i] for i in indices])
            push(self._pending[number], (shard, 1), flat, column.merge)

    def _look_at_buffers(self) -> list[Tensor]:
        """Return the buffers, and note which ones a shard has changed."""
        buffers, first = self._state.buffers(), self._state.first_buffers
        if [b.shape for b in buffers] != [f.shape for f in first]:
            before, after = ([tuple(b.shape) for b in all_] for all_ in (first, buffers))
            raise NotSupportedError(
                f"forward has changed the shapes of buffers from {before} to {after}: allocate "
                "them with their final shapes before run.steps"
            )
        changed = self._changed.tolist()
        for index, (buffer, value) in enumerate(zip(buffers, first, strict=True)):
            if not changed[index] and not torch.equal(buffer, value):
                self._changed[index] = 1
        return buffers

    def _copy_gradients(self, views: Sequence[Tensor], indices: Sequence[int]) -> None:
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
            self._used[index] = 1
            targets.append(view)
            sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def reduce(self, stop: bool) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """Set the gradients of all members to the mean over all samples.

        The gradients have the strides of their parameters, because optimizers with `fused=True`
        read both in the order of memory. The next step may overwrite their memory.

        Args:
            stop: True if this member asks to stop after this step.

        Returns:
            Buffers with their new values, and True if any member asks to stop.

        Raises:
            DistributedError: A member is lost.
            ReductionError: A shard of this member had no backward.
        """
        if self._next != self._runs[self._group.rank()].stop:
            raise ReductionError(f"shard {self._next} of this step had no backward")
        sums = [self._sum(number, c) for number, (c, _) in enumerate(self._columns)]
        later = enumerate(self._buffer_columns, len(self._columns))
        values = [self._sum(number, c) for number, (c, _) in later]
        stops = self._gather_notes(stop)
        total = float(self._weights.sum())
        used = self._used.tolist()
        for (column, indices), flat in zip(self._columns, sums, strict=True):
            flat.div_(total) if total else flat.zero_()
            for view, index in zip(column.views(flat), indices, strict=True):
                parameter = self._parameters[index]
                parameter.grad = _as_gradient(view, parameter) if used[index] else None
        changed: list[tuple[Tensor, Tensor]] = []
        buffers, first = self._state.buffers(), self._state.first_buffers
        by_shards = self._changed.tolist()
        for (column, indices), flat in zip(self._buffer_columns, values, strict=True):
            if column.add is _add:
                flat.div_(self._shards)
            for index, value in zip(indices, column.views(flat), strict=True):
                # summing masks that hold the largest float would give infinity
                changed.append((buffers[index], value if by_shards[index] else first[index]))
        return changed, stops

    def _sum(self, number: int, column: _Column) -> Tensor:
        """Return the sum over all shards, on all members, in separate memory."""
        rank, size, chunk = self._group.rank(), self._group.size(), column.chunk
        mine = [flat for _, flat in self._pending[number]]
        if size == 1:
            self._pending[number] = []  # it holds the gradients from now on
            return mine[0]
        nodes = [nodes_within(run) for run in self._runs]
        # for each member, its slice of each node of this member
        sent = mine[0] if len(mine) == 1 else _by_slice(mine, chunk, size, column.dtype)
        sizes = [len(of) * chunk for of in nodes]
        if column.received is None:
            column.received = torch.empty(sum(sizes), dtype=column.dtype)
            column.result = torch.empty(size * chunk, dtype=column.dtype)
        received, result = column.received, column.result
        exchange = getattr(self._group, ALL_TO_ALL_SINGLE)
        self._wait(exchange(_bytes(received), _bytes(sent), *_splits(column, sizes, rank)))
        slices = received.view(-1, chunk).unbind()
        order = [node for of in nodes for node in of]
        total = add_up(self._shards, dict(zip(order, slices, strict=True)), column.add)
        self._wait(getattr(self._group, ALL_GATHER_SINGLE)(_bytes(result), _bytes(total)))
        return result

    def _gather_notes(self, stop: bool) -> bool:
        """Gather weights, used parameters and changed buffers of all shards.

        Returns:
            True if any member asks to stop.
        """
        if self._group.size() == 1:
            return stop
        asks = torch.tensor([stop], dtype=torch.uint8)
        mine = torch.cat([self._weights.view(torch.uint8), self._used, self._changed, asks])
        gathered = torch.empty(self._group.size() * mine.numel(), dtype=torch.uint8)
        self._wait(getattr(self._group, ALL_GATHER_SINGLE)(gathered, mine))
        rows = gathered.view(self._group.size(), -1)
        of_weights = self._weights.numel() * self._weights.element_size()
        for run, row in zip(self._runs, rows, strict=True):
            weights = row[:of_weights].clone().view(torch.float64)
            self._weights[run.start : run.stop] = weights[run.start : run.stop]
        noted = rows[:, of_weights:].amax(dim=0)
        lengths = [len(self._used), len(self._changed), 1]
        self._used, self._changed, asked = noted.split(lengths)
        return bool(asked)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are added: at least single precision."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return dtype


def _by_sum_dtype(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Yield each dtype of a sum, with the indices of the tensors added in it."""
    sums = [_sum_dtype(dtype) for dtype in dtypes]
    for found in dict.fromkeys(sums):
        yield found, [index for index, dtype in enumerate(sums) if dtype == found]


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


def _as_gradient(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean with the strides of its parameter and the dtype of its gradient.

    Strides that leave gaps are ignored. The result shares memory if nothing has to change.
    """
    strides, dtype = memory_strides(parameter) or mean.stride(), _gradient_dtype(parameter)
    if strides == mean.stride() and dtype == mean.dtype:
        return mean
    return torch.empty_strided(mean.shape, strides, dtype=dtype).copy_(mean)


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def _largest(left: Tensor, right: Tensor) -> Tensor:
    return torch.maximum(left, right, out=left)


def _by_slice(flats: Sequence[Tensor], chunk: int, size: int, dtype: torch.dtype) -> Tensor:
    if not flats:
        return torch.empty(0, dtype=dtype)
    return torch.stack([flat.view(size, chunk) for flat in flats], dim=1).view(-1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _splits(column: _Column, received: Sequence[int], rank: int) -> tuple[Any, Any]:
    """Return the numbers of bytes to receive from, and to send to, each member."""
    width = column.dtype.itemsize
    sent = received[rank] * width
    return [count * width for count in received], [sent] * column.width
