"""Gradients of shards, reduced in one tree over the members, so that the bits never change.

The tree is binary and complete over a power of two of shards. A *node* is the contiguous range of
shards below it. A member adds up the largest nodes within its own shards; the nodes above are added
from these in the same order on any member. So every addition has the same two operands with any
number of members, and the sum has the same bits.

Each shard's gradients are copied into flat tensors, one per dtype, and added to those of the shards
on their left as far as both are on this member. The rest is sent once: each member gets a slice of
the subtrees of all members, finishes the tree for its slice, and all gather the slices. If each
member has one subtree, an all-reduce sends the same amount.

Flat tensors have at least single precision: sums and weights would overflow float16, and bfloat16
would round them. Their elements are in row-major order, whatever strides the parameters have on
each member.

Buffers that forward changes, such as running statistics, are reduced as well: every shard begins
with their values at the beginning of the step; floating-point buffers become the mean over shards,
others the maximum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.buckets import memory_strides
from gradwire.elastic.snapshot import Kept
from gradwire.errors import NotSupportedError, ReductionError

Node = tuple[int, int]
"""First shard below a node, and their number: a power of two that divides the first."""

Value = TypeVar("Value")


def nodes_of(shards: Iterable[int]) -> list[Node]:
    """Return the largest nodes that together cover shards in ascending order."""
    # nodes_of([1, 3, 4, 5, 6, 7]) returns [(1, 1), (3, 1), (4, 4)]
    pending: list[tuple[Node, None]] = []
    for shard in shards:
        push(pending, (shard, 1), None, lambda left, right: None)
    return [node for node, _ in pending]


def add_up(
    shards: int, values: Mapping[Node, Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Return the value of the root, from those of nodes that together cover all shards."""
    pending: list[tuple[Node, Value]] = []
    for node in sorted(values):  # `add` may write to the left value
        push(pending, node, values[node], add)
    ((root, value),) = pending
    assert root == (0, shards), "the nodes are not the tree's leaves"
    return value


def push(
    pending: list[tuple[Node, Value]],
    node: Node,
    value: Value,
    add: Callable[[Value, Value], Value],
) -> None:
    """Append a node, and add siblings: at most log2(shards) nodes are pending."""
    pending.append((node, value))
    while len(pending) > 1:
        (left, first), ((start, size), second) = pending[-2:]
        if left != (start - size, size) or not start & size:
            return
        pending[-2:] = [((start - size, 2 * size), add(first, second))]


class _Column:
    """Tensors that are reduced in one dtype, contiguous in flat memory."""

    def __init__(
        self, tensors: Sequence[Tensor], indices: list[int], dtype: torch.dtype, width: int
    ) -> None:
        # width: number of members, and of slices of the flat memory
        self.indices, self.dtype, self.width = indices, dtype, width
        # tensors are added, or else their largest elements taken
        self.averages = dtype.is_floating_point or dtype.is_complex
        self.shapes = [tensors[i].shape for i in indices]
        self.sizes = [tensors[i].numel() for i in indices]
        self.numel = sum(self.sizes)
        self.chunk = -(-self.numel // width)
        self.pending: list[tuple[Node, Tensor]] = []
        self.spare: list[Tensor] = []
        # reused in each step, because new pages cost as much as the copies into them
        self.received: Tensor | None = None
        self.result = torch.empty(0, dtype=torch.float32)

    def take(self) -> Tensor:
        """Return flat memory with undefined values."""
        if self.spare:
            return self.spare.pop()
        flat = torch.empty(self.chunk * self.width, dtype=self.dtype)
        flat[self.numel :].zero_()
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of flat memory."""
        parts = flat[: self.numel].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Write the sum, or the larger elements, to the left tensor, and return it."""
        return left.add_(right) if self.averages else torch.maximum(left, right, out=left)

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        """Add the second tensor to the first, and reuse the memory of the second."""
        self.spare.append(right)
        return self.add(left, right)


def _columns(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], width: int) -> list[_Column]:
    """Return a column for each dtype in which tensors are added."""
    found: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        if dtype.is_floating_point or dtype.is_complex:  # at least single precision
            single = torch.complex64 if dtype.is_complex else torch.float32
            dtype = dtype if dtype.itemsize >= single.itemsize else single
        found.setdefault(dtype, []).append(index)
    return [_Column(tensors, indices, dtype, width) for dtype, indices in found.items()]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def as_gradient(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean on its parameter's device, with its strides and its gradient's dtype."""
    # strides that leave gaps are ignored; the result shares memory if nothing has to change
    strides, dtype = memory_strides(parameter) or mean.stride(), gradient_dtype(parameter)
    if strides == mean.stride() and dtype == mean.dtype and parameter.device == mean.device:
        return mean
    own = torch.empty_strided(mean.shape, strides, dtype=dtype, device=parameter.device)
    return own.copy_(mean)


class Contribution(NamedTuple):
    """Result of one shard."""

    flats: list[Tensor]  # weighted gradients, and buffers, in the flat memory of each column
    weight: float
    used: Tensor  # 1 for each parameter that has a gradient
    changed: Tensor  # 1 for each buffer that forward has changed


class Notes(NamedTuple):
    """Values that members send with a step, besides sums."""

    stop: bool  # any member asks to stop after this step
    seconds: list[float]  # time of each member for a shard
    digests: list[bytes]  # of each member's parameters; empty if they were not compared


class TreeSum:
    """Reduction of one step after the other, for one generation."""

    def __init__(
        self,
        kept: Kept,
        shards: int,
        group: ProcessGroup,
        wait: Callable[[Work], object],
        assigned: Sequence[Sequence[int]],
    ) -> None:
        # every member has the same parameters, buffers and frozen parameters
        self._kept, self._trained = kept, [p.requires_grad for p in kept.parameters]
        self._parameters = [p for p in kept.parameters if p.requires_grad]
        self.known = {id(p) for p in self._parameters}
        self._shards, self._group, self._wait = shards, group, wait
        self._rank, self._size, buffers = group.rank(), group.size(), kept.buffers()
        dtypes = [gradient_dtype(p) for p in self._parameters]
        self._of_gradients = _columns(self._parameters, dtypes, self._size)
        self._of_buffers = _columns(buffers, [b.dtype for b in buffers], self._size)
        self._columns = [*self._of_gradients, *self._of_buffers]
        self._flags = len(self._parameters), len(buffers)
        self.assign(assigned)
        self.clear()

    def assign(self, assigned: Sequence[Sequence[int]]) -> None:
        """Set the shards of each member for the steps that follow."""
        self._own = assigned[self._rank]
        self._nodes = [nodes_of(shards) for shards in assigned]
        for column in self._columns:
            column.received = None

    def fits(self) -> bool:
        """Return True if the same parameters are trained as at construction."""
        return self._trained == [p.requires_grad for p in self._kept.parameters]

    def clear(self) -> None:
        """Reset for a new step."""
        for column in self._columns:
            column.spare += [flat for _, flat in column.pending]
            column.pending = []
        self._weights = torch.zeros(self._shards, dtype=torch.float64)
        self._used, self._changed = (torch.zeros(n, dtype=torch.uint8) for n in self._flags)
        self._missing = deque(self._own)

    def collect(self, weight: float) -> Contribution:
        """Take the gradients of a shard's mean, multiplied by the shard's weight."""
        used, flats = torch.zeros_like(self._used), []
        for column in self._of_gradients:
            flat = column.take()
            targets, sources = [], []
            for view, index in zip(column.views(flat), column.indices, strict=True):
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
            if weight != 1:
                flat.mul_(weight)
            flats.append(flat)
        buffers, first = self._kept.buffers(), self._kept.first_buffers
        if [b.shape for b in buffers] != [f.shape for f in first]:
            before, after = ([tuple(b.shape) for b in all_] for all_ in (first, buffers))
            raise NotSupportedError(
                f"forward has changed the shapes of buffers from {before} to {after}: allocate "
                "them with their final shapes before run.steps"
            )
        pairs = zip(buffers, first, strict=True)
        changed = torch.tensor([not torch.equal(b, f) for b, f in pairs], dtype=torch.uint8)
        for column in self._of_buffers:
            flats.append(column.take())
            sources = [buffers[i] for i in column.indices]
            torch._foreach_copy_(column.views(flats[-1]), sources)
        return Contribution(flats, weight, used, changed)

    def copy_of(self, contribution: Contribution) -> Contribution:
        """Return a copy, in memory that fits the number of members."""
        flats = []
        for column, flat in zip(self._columns, contribution.flats, strict=True):
            flats.append(column.take())
            flats[-1][: column.numel].copy_(flat[: column.numel])
        return contribution._replace(flats=flats)

    def gather_held(self, own: Iterable[int]) -> list[list[int]]:
        """Return the shards whose results each member holds."""
        mine = torch.zeros(self._shards, dtype=torch.uint8)
        mine[list(own)] = 1
        return [row.nonzero().flatten().tolist() for row in self._all_gather(mine)]

    def add(self, shard: int, contribution: Contribution) -> None:
        """Add the result of a shard, whose memory is then reused."""
        if not self._missing or shard != self._missing[0]:
            expected = self._missing[0] if self._missing else "none"
            raise ReductionError(f"backward of shard {shard}: expected shard {expected}")
        self._missing.popleft()
        self._weights[shard] = contribution.weight
        self._used |= contribution.used
        self._changed |= contribution.changed
        for column, flat in zip(self._columns, contribution.flats, strict=True):
            push(column.pending, (shard, 1), flat, column.merge)

    @torch.no_grad()
    def reduce(
        self, stop: bool, seconds: float, digest: bytes
    ) -> tuple[list[tuple[Tensor, Tensor]], Notes]:
        """Set all gradients to the mean over all samples; return buffers, new values, and notes."""
        if self._missing:
            raise ReductionError(f"shard {self._missing[0]} of this step had no backward")
        slices = [self._sum_slice(column) for column in self._columns]
        notes = self._gather_notes(stop, seconds, digest)
        total, used = float(self._weights.sum()), self._used.tolist()
        count, by_shards = len(self._of_gradients), self._changed.tolist()
        for column, part in zip(self._of_gradients, slices[:count], strict=True):
            flat = self._gather_slices(column, part, total)
            for view, index in zip(column.views(flat), column.indices, strict=True):
                parameter = self._parameters[index]
                # in the parameter's strides, because optimizers with `fused=True` read both in the
                # order of memory; the next step may overwrite the gradient's memory
                parameter.grad = as_gradient(view, parameter) if used[index] else None
        changed: list[tuple[Tensor, Tensor]] = []
        buffers, first = self._kept.buffers(), self._kept.first_buffers
        for column, part in zip(self._of_buffers, slices[count:], strict=True):
            flat = self._gather_slices(column, part, self._shards if column.averages else 1)
            for index, value in zip(column.indices, column.views(flat), strict=True):
                # summing masks that hold the largest float would give infinity
                changed.append((buffers[index], value if by_shards[index] else first[index]))
        return changed, notes

    def _sum_slice(self, column: _Column) -> Tensor:
        """Return this member's slice of the sum over all shards."""
        size, chunk = self._size, column.chunk
        mine = [flat for _, flat in column.pending]
        if size == 1:
            column.pending = []  # it holds the gradients from now on
            return mine[0]
        # for each member, its slice of each node of this member
        if len(mine) == 1:
            sent = mine[0]
        elif mine:
            sent = torch.stack([flat.view(size, chunk) for flat in mine], dim=1).view(-1)
        else:
            sent = torch.empty(0, dtype=column.dtype)
        order = [node for nodes in self._nodes for node in nodes]
        if column.received is None:
            column.received = torch.empty(len(order) * chunk, dtype=column.dtype)
            column.result = torch.empty(size * chunk, dtype=column.dtype)
        received = column.received
        numbers = [len(nodes) * chunk * column.dtype.itemsize for nodes in self._nodes]
        exchange = getattr(self._group, ALL_TO_ALL_SINGLE)  # bytes, which every backend can send
        as_bytes = received.view(torch.uint8), sent.view(torch.uint8)
        self._wait(exchange(*as_bytes, numbers, [numbers[self._rank]] * size))
        slices = received.view(-1, chunk).unbind()
        return add_up(self._shards, dict(zip(order, slices, strict=True)), column.add)

    def _gather_slices(self, column: _Column, part: Tensor, count: float) -> Tensor:
        """Divide a slice, and return those of all members; of a single member, its own memory."""
        if count != 1:
            part = part.div_(count) if count else part.zero_()
        if self._size == 1:
            return part
        gather = getattr(self._group, ALL_GATHER_SINGLE)
        self._wait(gather(column.result.view(torch.uint8), part.view(torch.uint8)))
        return column.result

    def _all_gather(self, mine: Tensor) -> Tensor:
        """Return the bytes of all members, in one row each."""
        gathered = torch.empty(self._size, mine.numel(), dtype=torch.uint8)
        self._wait(getattr(self._group, ALL_GATHER_SINGLE)(gathered.view(-1), mine))
        return gathered

    def _gather_notes(self, stop: bool, seconds: float, digest: bytes) -> Notes:
        """Gather weights, used parameters and changed buffers of all shards, and the notes."""
        if self._size == 1:
            return Notes(stop, [seconds], [digest])
        # the digest has the same length on all members
        numbers = torch.cat([self._weights, torch.tensor([seconds], dtype=torch.float64)])
        flags = torch.cat([self._used, self._changed, torch.tensor([stop], dtype=torch.uint8)])
        parts = [numbers.view(torch.uint8), torch.tensor(list(digest), dtype=torch.uint8), flags]
        gathered = self._all_gather(torch.cat(parts))
        rows = gathered.split([part.numel() for part in parts], dim=1)
        of_members = rows[0].clone().view(torch.float64)
        self._weights = of_members[:, :-1].sum(dim=0)  # 0 for the shards of others
        self._used, self._changed, asked = rows[2].amax(dim=0).split([*self._flags, 1])
        digests = [bytes(row) for row in rows[1].tolist()]
        return Notes(bool(asked), of_members[:, -1].tolist(), digests)
