"""Tree in which the gradients of shards are added, with integers only.

The tree is binary and complete over a power of two of shards. A *node* is the contiguous range of
shards below it. A member adds up the largest nodes within its own shards; the nodes above are added
from these in the same order on any member. So every addition has the same two operands with any
number of members, and the sum has the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE
from gradwire.buckets import memory_strides
from gradwire.elastic.kept import Kept
from gradwire.errors import NotSupportedError, ReductionError

Node = tuple[int, int]
"""First shard below a node, and their number: a power of two that divides the first."""

Value = TypeVar("Value")


def nodes_of(shards: Iterable[int]) -> list[Node]:
    """Return the largest nodes that together cover shards in ascending order.

    Example:
        >>> nodes_of([1, 3, 4, 5, 6, 7])
        [(1, 1), (3, 1), (4, 4)]
    """
    pending: list[tuple[Node, None]] = []
    for shard in shards:
        push(pending, (shard, 1), None, lambda left, right: None)
    return [node for node, _ in pending]


def sibling(node: Node) -> Node:
    """Return the sibling of a node."""
    first, size = node
    return first ^ size, size


def parent(node: Node) -> Node:
    """Return the parent of a node."""
    first, size = node
    return first & ~size, 2 * size


def add_up(
    shards: int, values: Mapping[Node, Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Return the value of the root, from those of nodes that together cover all shards.

    Args:
        shards: Number of shards.
        values: Value of each node; no node is below another.
        add: Function of the values of a left and a right child; it may write to the left one.

    Example:
        >>> add_up(4, {(0, 2): "ab", (2, 1): "c", (3, 1): "d"}, lambda x, y: f"({x}+{y})")
        '(ab+(c+d))'
    """
    pending: list[tuple[Node, Value]] = []
    for node in sorted(values):
        merged = push(pending, node, values[node], add)
    assert merged == (0, shards), "the nodes are not the tree's leaves"
    return pending[0][1]


def push(
    pending: list[tuple[Node, Value]],
    node: Node,
    value: Value,
    add: Callable[[Value, Value], Value],
) -> Node:
    """Append a node, and add siblings: at most log2(shards) nodes are pending.

    Returns:
        Node that contains the appended one.
    """
    pending.append((node, value))
    while len(pending) > 1 and pending[-2][0] == sibling(pending[-1][0]) < pending[-1][0]:
        (left, first), (_, second) = pending[-2:]
        pending[-2:] = [(parent(left), add(first, second))]
    return pending[-1][0]


class Column:
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

    @property
    def averaged(self) -> bool:
        """True if the tensors are added, rather than the largest elements taken."""
        return self.add is add_to_left

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


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are added: at least single precision."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return dtype


def by_sum_dtype(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Yield each dtype of a sum, with the indices of the tensors added in it."""
    sums = [_sum_dtype(dtype) for dtype in dtypes]
    for found in dict.fromkeys(sums):
        yield found, [index for index, dtype in enumerate(sums) if dtype == found]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def as_gradient(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean on its parameter's device, with its strides and its gradient's dtype.

    Strides that leave gaps are ignored. The result shares memory if nothing has to change.
    """
    strides, dtype = memory_strides(parameter) or mean.stride(), gradient_dtype(parameter)
    if strides == mean.stride() and dtype == mean.dtype and parameter.device == mean.device:
        return mean
    own = torch.empty_strided(mean.shape, strides, dtype=dtype, device=parameter.device)
    return own.copy_(mean)


def add_to_left(left: Tensor, right: Tensor) -> Tensor:
    """Write the sum to the left tensor, and return it."""
    return left.add_(right)


def larger_to_left(left: Tensor, right: Tensor) -> Tensor:
    """Write the larger elements to the left tensor, and return it."""
    return torch.maximum(left, right, out=left)


def divide(flat: Tensor, count: float) -> Tensor:
    """Divide in place, and return the tensor; zeros if the count is 0."""
    if count == 1:
        return flat
    return flat.div_(count) if count else flat.zero_()


def by_slice(flats: Sequence[Tensor], chunk: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return flat tensors in the order in which an all_to_all sends their slices."""
    if not flats:
        return torch.empty(0, dtype=dtype)
    return torch.stack([flat.view(size, chunk) for flat in flats], dim=1).view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bytes, which every backend can send."""
    return tensor.view(torch.uint8)


def splits(column: Column, received: Sequence[int], rank: int) -> tuple[Any, Any]:
    """Return the numbers of bytes to receive from, and to send to, each member."""
    width = column.dtype.itemsize
    sent = received[rank] * width
    return [count * width for count in received], [sent] * column.width


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
        kept: Models, with the same parameters, buffers and frozen parameters on every member.
        shards: Number of shards of a step.
        group: Group of the members.
        wait: Function that waits for their collectives.
        assigned: Shards of each member, in ascending order.

    Attributes:
        known: Ids of the trained parameters.
    """

    def __init__(
        self,
        kept: Kept,
        shards: int,
        group: ProcessGroup,
        wait: Callable[[Work], object],
        assigned: Sequence[Sequence[int]],
    ) -> None:
        self._kept, self._trained = kept, [p.requires_grad for p in kept.parameters]
        self._parameters = [p for p in kept.parameters if p.requires_grad]
        self.known = {id(p) for p in self._parameters}
        self._shards, self._group, self._wait = shards, group, wait
        self._columns: list[tuple[Column, list[int]]] = []  # with indices into parameters
        self._buffer_columns: list[tuple[Column, list[int]]] = []  # with indices into buffers
        for dtype, indices in by_sum_dtype([gradient_dtype(p) for p in self._parameters]):
            like = [self._parameters[i].detach() for i in indices]
            self._columns.append((Column(dtype, like, add_to_left, group.size()), indices))
        found = kept.buffers()
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
        return self._trained == [p.requires_grad for p in self._kept.parameters]

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
        buffers, first = self._kept.buffers(), self._kept.first_buffers
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
        buffers, first = self._kept.buffers(), self._kept.first_buffers
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
