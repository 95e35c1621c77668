"""Reductions over shared memory, always in the order of the ranks, and calls with cached setups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire.errors import ArgumentError
from gradwire.recorder import Entry
from gradwire.shm.header import INLINE, NUMBERS, PRIVATE, Call, Location
from gradwire.shm.movement import Movement, block_start, copy_but, fill_slot, share
from gradwire.shm.regions import USERS
from gradwire.shm.tensors import copy, count_write, overwrites


def number_of(op: object) -> int:
    """Return torch.distributed's number of a reduce op."""
    number: int = op.value  # type: ignore[attr-defined]
    return number


OPS: dict[int, Callable[..., Tensor]] = {
    number_of(ReduceOp.SUM): torch.add,
    number_of(ReduceOp.AVG): torch.add,
    number_of(ReduceOp.PRODUCT): torch.mul,
    number_of(ReduceOp.MIN): torch.minimum,
    number_of(ReduceOp.MAX): torch.maximum,
    number_of(ReduceOp.BAND): torch.bitwise_and,
    number_of(ReduceOp.BOR): torch.bitwise_or,
    number_of(ReduceOp.BXOR): torch.bitwise_xor,
}
"""Binary functions by torch.distributed's number of the reduce op."""

SUM = number_of(ReduceOp.SUM)
_AVG = number_of(ReduceOp.AVG)
_BITWISE = {number_of(ReduceOp.BAND), number_of(ReduceOp.BOR), number_of(ReduceOp.BXOR)}
_ORDERED = {number_of(ReduceOp.MIN), number_of(ReduceOp.MAX)}
_PRODUCT = number_of(ReduceOp.PRODUCT)
_ROUNDING = {SUM, _AVG, _PRODUCT}
_WIDE_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # few of torch's ops support them
HALF = {torch.float16, torch.bfloat16}


@cache
def check_reduction(op: int, dtype: torch.dtype) -> None:
    """Raise unless tensors of `dtype` can be reduced by `op`."""
    name = ReduceOp.RedOpType(op).name
    fractional = dtype.is_floating_point or dtype.is_complex
    if op not in OPS:
        known = ", ".join(ReduceOp.RedOpType(o).name for o in OPS)
        raise ArgumentError(f"reduce op is {name}: the shm backend supports {known}")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ArgumentError(f"tensors of {dtype} cannot be reduced: convert them to bfloat16")
    if dtype in _WIDE_UNSIGNED and op not in _BITWISE and op != _PRODUCT:
        raise ArgumentError(f"tensors of {dtype} cannot be reduced by {name}: convert them")
    if op == _AVG and dtype == torch.complex32:
        raise ArgumentError(f"tensors of {dtype} cannot be averaged: convert them to complex64")
    if op in _BITWISE and fractional:
        raise ArgumentError(f"reduce op {name} works on integers, but the tensor is {dtype}")
    if op == _AVG and not fractional:
        raise ArgumentError(
            f"reduce op AVG needs floating point, but the tensor is {dtype}: use SUM and divide"
        )
    if op in _ORDERED and dtype.is_complex:
        raise ArgumentError(f"reduce op {name} has no meaning for {dtype}: use SUM or PRODUCT")


def reduce_into(out: Tensor, pieces: Sequence[Tensor], op: int) -> None:
    """Set `out` to the reduction of the pieces: ((piece 0 ∘ piece 1) ∘ piece 2) …."""
    # float16 and bfloat16 are accumulated in float32 and rounded once.
    function = OPS[op]
    if out.numel() == 0:
        return
    if len(pieces) == 1:
        if out.data_ptr() != pieces[0].data_ptr():
            out.copy_(pieces[0])
        return
    if op == _AVG:
        _average_into(out, pieces)
        return
    if out.dtype in HALF and op in _ROUNDING and len(pieces) > 2:
        total = function(pieces[0].float(), pieces[1])
        for piece in pieces[2:]:
            function(total, piece, out=total)
        out.copy_(total)
        return
    if len(pieces) > 2 and any(piece.data_ptr() == out.data_ptr() for piece in pieces[2:]):
        total = torch.empty_like(out)  # `out` is still read after the first step
        reduce_into(total, pieces, op)
        out.copy_(total)
        return
    function(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        function(out, piece, out=out)


def _average_into(out: Tensor, pieces: Sequence[Tensor]) -> None:
    """Set `out` to the average of two or more pieces; it overflows only where the average does."""
    # Before they are added, the pieces are scaled by a power of two, which is exact.
    power = 1 << (len(pieces) - 1).bit_length()
    if out.dtype in HALF:
        total = pieces[0].float().mul_(1 / power)
    elif any(piece.data_ptr() == out.data_ptr() for piece in pieces[1:]):
        total = pieces[0] * (1 / power)
    else:
        total = torch.mul(pieces[0], 1 / power, out=out)
    for piece in pieces[1:]:
        total.add_(piece, alpha=1 / power)
    if power != len(pieces):
        total.div_(len(pieces) / power)
    if total is not out:
        out.copy_(total)


def reducer(op: int, count: int) -> Callable[[Tensor, Sequence[Tensor]], object]:
    """Return `reduce_into` for an op and a number of pieces, none of which is empty."""
    if count == 2 and op != _AVG:
        function = OPS[op]
        return lambda out, pieces: function(pieces[0], pieces[1], out=out)
    return lambda out, pieces: reduce_into(out, pieces, op)


_CACHED_BYTES = 256 << 10
"""Size of pieces that stay in a core's cache from the additions to the copies of the result."""
_UNCUT_BYTES = 4 << 20
"""Maximum size of a share that is not cut: pieces take 1.2 to 1.5 of the time of 2 to 6 MiB."""


def _in_pieces(tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
    """Cut tensors of equal size; return a list of their slices for each piece."""
    # One call of `split` cuts each tensor: a separate slice costs as much as adding a thousand
    # numbers.
    if tensors[0].nbytes <= _UNCUT_BYTES:
        return [tensors]
    step = _CACHED_BYTES // tensors[0].itemsize
    return list(zip(*[tensor.split(step) for tensor in tensors], strict=True))


Key = tuple[torch.Size, torch.dtype, int]
"""Kind of calls: shape and dtype of the tensor, number of the reduce op."""
_KEPT = 256


class SharedMemory(Movement):
    """State of ranks that all share memory, with all collectives."""

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce `flat` over all ranks, in place: on all ranks, or on the call's root only."""
        gets_result = call.root in (-1, self.rank)
        if flat.nbytes <= self.inline_bytes:
            self.announce(call, Location(INLINE), [flat])
            if gets_result:
                reduce_into(flat, self.all_inline(flat.dtype, flat.numel()), call.op)
            return
        own = share(flat.numel(), self.rank, self.size)
        self.announce(call, self.location_for([flat], flat, own, reduces=True))
        locations = self.locations()
        first = min(location.region for location in locations)  # PRIVATE < upfront < USERS
        if first == PRIVATE:
            self._reduce_through_slots(call, flat, gets_result=gets_result)
        elif first < USERS:
            self._reduce_and_fetch(call, locations, flat)
        else:
            self._reduce_in_place(call, locations, flat)
        if gets_result:
            count_write(flat)  # other ranks may have written all of it, if its own share is empty

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """Set `out` to the reduction of the blocks that all ranks have for this one."""
        start, count, ranks = block_start(call, self.rank), out.numel(), range(self.size)
        if sum(block.nbytes for block in blocks) <= self.inline_bytes:
            self.announce(call, Location(INLINE), blocks)
            reduce_into(out, [self.inline(r, call.dtype, start, count) for r in ranks], call.op)
            return
        # a result that replaces this rank's block may still overlap other blocks
        in_place = out.data_ptr() == blocks[self.rank].data_ptr()
        read = [block for r, block in enumerate(blocks) if r != self.rank or not in_place]
        if overwrites(read, [out], 0, None):
            blocks, base = [block.clone() for block in blocks], None
        own = start, start + count
        self.announce(call, self.location_for(blocks, base, own, reduces=True))
        locations = self.locations()
        if all(location.region >= 0 for location in locations):
            pieces = [
                blocks[r] if r == self.rank else self.at(r, locations[r], call.dtype, start, count)
                for r in ranks
            ]
            for into, *cut in _in_pieces([out, *pieces]):
                reduce_into(into, cut, call.op)
            self.sync_in_place(locations)
        else:
            self._reduce_scatter_through_slots(call, blocks, out)

    def _reduce_scatter_through_slots(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor
    ) -> None:
        """Run reduce_scatter as a pipeline."""
        # In each step, copy in a piece of the block for every other rank, and reduce an earlier
        # piece of this rank's result. A slot has no part for the rank itself, which reads its own
        # block in place.
        rank, parts = self.rank, max(1, self.size - 1)
        slots = [self.slots(r, call.dtype) for r in range(self.size)]
        ring, count = self.ring, out.numel()
        step = ring.slot_bytes // call.dtype.itemsize // parts
        others = [*blocks[:rank], *blocks[rank + 1 :]]
        for fill, now in self.pipeline(
            math.ceil(max(call.sends, default=call.numel) / step), stages=2
        ):
            if fill >= 0:
                lo = fill * step
                fill_slot(
                    slots[rank][fill % ring.slots],
                    [block[lo : lo + step] for block in others],
                    step,
                )
            lo = now * step
            if 0 <= lo < count:
                target = out[lo : lo + step]
                sources = []
                for r, each in enumerate(slots):
                    first = (rank - (rank > r)) * step
                    sources.append(each[now % ring.slots][first : first + target.numel()])
                sources[rank] = blocks[rank][lo : lo + step]
                reduce_into(target, sources, call.op)

    def _reduce_in_place(self, call: Call, locations: Sequence[Location], flat: Tensor) -> None:
        """Reduce this rank's share and write it to all ranks' tensors, which are all in regions."""
        start, stop = share(flat.numel(), self.rank, self.size)
        tensors = [
            flat[start:stop] if r == self.rank else self.at(r, at, flat.dtype, start, stop - start)
            for r, at in enumerate(locations)
        ]
        at = max(call.root, 0)
        for pieces in _in_pieces(tensors):
            reduce_into(pieces[at], pieces, call.op)
            if call.root < 0:
                for target in pieces[1:]:
                    copy(target, pieces[0])
        self.sync()

    def _reduce_and_fetch(self, call: Call, locations: Sequence[Location], flat: Tensor) -> None:
        """Reduce this rank's share into shared memory, and then fetch the others'."""
        # The share is written to this rank's shared copy, or to the root's. A rank reads its own
        # share from its tensor: no other rank needs it.
        rank, count, dtype = self.rank, flat.numel(), flat.dtype
        start, stop = share(count, rank, self.size)
        sources = [
            flat[start:stop] if r == rank else self.at(r, at, dtype, start, stop - start)
            for r, at in enumerate(locations)
        ]
        own = locations[rank]
        shown = flat
        if own.region < USERS:
            shown = self._upfront[own.region][self._parity].view(dtype)[:count]
        result = shown[start:stop] if call.root in (-1, rank) else sources[call.root]
        reduce_into(result, sources, call.op)
        if call.root < 0:
            copy(sources[rank], result)
        self.sync()
        if call.root == rank:
            copy(flat, shown)
        if call.root < 0:
            for r, location in enumerate(locations):
                start, stop = share(count, r, self.size)
                if r != rank and start < stop:
                    copy(flat[start:stop], self.at(r, location, dtype, start, stop - start))
            self.sync_in_place(locations)

    def _reduce_through_slots(self, call: Call, flat: Tensor, *, gets_result: bool) -> None:
        """Reduce as a pipeline."""
        # In each step, copy a piece in, reduce this rank's share of an earlier piece, and copy a
        # still earlier one out. A rank reads its own share from its tensor: no other rank needs it.
        rank, size = self.rank, self.size
        slots = [self.slots(r, flat.dtype) for r in range(size)]
        ring = self.ring
        pieces = flat.split(ring.slot_bytes // flat.dtype.itemsize)
        for fill, now, fetch in self.pipeline(len(pieces), stages=3):
            if fill >= 0:
                copy_but(
                    share(len(pieces[fill]), rank, size),
                    pieces[fill],
                    slots[rank][fill % ring.slots],
                )
            if now >= 0:
                start, stop = share(len(pieces[now]), rank, size)
                if start < stop:
                    sources = [slots[r][now % ring.slots][start:stop] for r in range(size)]
                    result, sources[rank] = sources[rank], pieces[now][start:stop]
                    reduce_into(result, sources, call.op)
                    if gets_result:
                        copy(sources[rank], result)
            if fetch >= 0 and gets_result:
                for r in range(size):
                    start, stop = share(len(pieces[fetch]), r, size)
                    if r != rank and start < stop:
                        copy(pieces[fetch][start:stop], slots[r][fetch % ring.slots][start:stop])


# --- all_reduce of one tensor, with its setup cached ---


class KnownCall:
    """all_reduce of ordinary tensors of one shape and dtype, with the data beside the header."""

    __slots__ = ("_exchange", "_reduce", "like")

    def __init__(self, state: SharedMemory, call: Call, shape: torch.Size) -> None:
        self._exchange = state.short_exchange(call, shape)
        self._reduce = reducer(call.op, state.size)
        # recorder's entry of an earlier call
        self.like: Entry | None = None

    def __call__(self, tensor: Tensor) -> None:
        """Reduce a tensor, as a job of the group."""
        self._reduce(tensor, self._exchange(tensor))


class KnownCalls:
    """Cache of the setup of calls, from the second call of a kind on."""

    def __init__(self, state: SharedMemory) -> None:
        self._state = state
        self._of: dict[Key, KnownCall | None] = {}

    def find(self, tensor: Tensor, op: int) -> KnownCall | None:
        """Return the setup for an ordinary tensor; None for the first call of its kind."""
        key = tensor.shape, tensor.dtype, op
        known = self._of.get(key)
        if known is None and tensor.dtype in NUMBERS:
            check_reduction(op, tensor.dtype)
            # the setup takes as long as some calls, which programs whose sizes always change would
            # not regain
            if key in self._of and 0 < tensor.nbytes <= self._state.inline_bytes:
                call = Call("all_reduce", tensor.dtype, tensor.numel(), op)
                known = KnownCall(self._state, call, tensor.shape)
            if len(self._of) >= _KEPT:
                self._of.clear()
            self._of[key] = known
        return known

    def clear(self) -> None:
        """Release the shared memory."""
        self._of.clear()
