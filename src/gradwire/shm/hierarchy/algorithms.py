"""Algorithms of a group over several hosts; see `gradwire.shm.algorithms.interface.Algorithms`."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.shm.algorithms.arithmetic import reduce_into
from gradwire.shm.hierarchy.context import Context
from gradwire.shm.hierarchy.moving import AllGather, Broadcast, exchange
from gradwire.shm.hierarchy.reducing import ReduceScatter, all_reduce
from gradwire.shm.memory.copying import overwrites
from gradwire.shm.memory.header import NUMBERS, Call

_PACK_BYTES = 4 << 20
"""Maximum size of packed tensors of a list; larger tensors are sent separately."""


class AcrossHosts:
    """One rank's part of collectives over several hosts; implements `Algorithms`.

    Args:
        context: State of the group on this rank.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""
        self._context.announce(Call(kind))

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors."""
        data = [flat] if self._context.rank == call.root else []
        rows = self._context.announce(call, data, flat.nbytes)
        if rows is not None:
            if not data:
                _copy(flat, rows[call.root].view(flat.dtype))
        else:
            Broadcast(self._context, flat, call.root).run()

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks."""
        numbers = [n for flat in flats for n in (NUMBERS[flat.dtype], flat.numel())]
        total, checksum = sum(flat.nbytes for flat in flats), zlib.crc32(array("q", numbers))
        self._context.announce(
            Call("broadcast_coalesced", numel=total, root=root, checksum=checksum)
        )
        for packed in _packs(flats):
            if len(packed) == 1:
                Broadcast(self._context, packed[0].view(torch.uint8), root).run()
                continue
            parts = [flat.view(torch.uint8) for flat in packed]
            together = torch.cat(parts)
            Broadcast(self._context, together, root).run()
            if self._context.rank != root:
                torch.split_with_sizes_copy(together, [len(part) for part in parts], out=parts)

    def exchange(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Fetch the block that each other rank has for this one."""
        into = [block for block in incoming if block is not None]
        assert len(into) == self._context.size  # only a broadcast would have fewer
        # without tables, the blocks' sizes are in the call, and equal on all ranks
        nbytes = sum(block.nbytes for block in outgoing)
        known = () if call.sends else (outgoing, nbytes)
        rows = self._context.announce(call, *known)
        own = outgoing[0 if shared else self._context.rank]
        if rows is not None:
            start = 0 if shared else self._context.rank * own.nbytes
            for target, row in zip(into, rows, strict=True):
                target.copy_(row[start : start + own.nbytes].view(own.dtype))
            return
        if overwrites(outgoing, into, self._context.rank, own):
            outgoing = [block.clone() for block in outgoing]
            own = outgoing[0 if shared else self._context.rank]
        if shared:
            AllGather(self._context, own, into).run()
        else:
            exchange(self._context, outgoing, into)

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Exchange blocks whose sizes may differ."""
        self._exchange_blocks(kind, outgoing, incoming, -1, shared=shared)

    def _exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        root: int,
        *,
        shared: bool = False,
    ) -> None:
        sends = tuple(block.numel() for block in outgoing) * (self._context.size if shared else 1)
        receives = tuple(block.numel() for block in incoming)
        call = Call(kind, incoming[0].dtype, root=root, sends=sends, receives=receives)
        self.exchange(call, outgoing, incoming, shared=shared)

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """Copy each rank's values to the root."""
        outgoing = [source[:0]] * self._context.size
        outgoing[root] = source
        incoming = into or [source.new_empty(0)] * self._context.size
        self._exchange_blocks("gather", outgoing, incoming, root)

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Copy the root's block for each rank to that rank."""
        incoming = [out[:0]] * self._context.size
        incoming[root] = out
        self._exchange_blocks("scatter", blocks or [out[:0]] * len(incoming), incoming, root)

    def reduce(self, call: Call, flat: Tensor) -> None:
        """Reduce a tensor in place; to one root, it moves as many bytes as to all ranks."""
        rows = self._context.announce(call, [flat], flat.nbytes)
        is_root = call.root == self._context.rank
        if rows is not None:
            if call.root < 0 or is_root:
                reduce_into(flat, [row.view(flat.dtype) for row in rows], call.op)
            return
        gets_result = call.root < 0 or is_root
        all_reduce(self._context, flat if gets_result else flat.clone(), call.op)

    def reduce_scatter(
        self, call: Call, blocks: Sequence[Tensor], out: Tensor, *, base: Tensor | None = None
    ) -> None:
        """Reduce the blocks that all ranks have for this one."""
        nbytes = sum(block.nbytes for block in blocks)
        known = () if call.sends else (blocks, nbytes)
        rows = self._context.announce(call, *known)
        rank = self._context.rank
        if rows is not None:
            start = rank * out.nbytes
            parts = [row[start : start + out.nbytes].view(out.dtype) for row in rows]
            reduce_into(out, parts, call.op)
            return
        if overwrites(blocks, [out if r == rank else None for r in range(len(blocks))], rank, None):
            blocks = [block.clone() for block in blocks]
        ReduceScatter(self._context, call, blocks, out).run()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel():
        target.copy_(source)


def _packs(flats: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of some MiB together or of one large tensor."""
    pack: list[Tensor] = []
    for flat in flats:
        if flat.numel() == 0:
            continue
        if pack and sum(f.nbytes for f in pack) + flat.nbytes > _PACK_BYTES:
            yield pack
            pack = []
        pack.append(flat)
    if pack:
        yield pack
