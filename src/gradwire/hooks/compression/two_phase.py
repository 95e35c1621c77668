"""An all_reduce of codes: each rank sums a share of the bucket, in floats, and sends it to all.

Every rank encodes its gradients and sends each share to the rank that owns it (all_to_all); the
owner decodes what it got from all, adds it up in rank order, encodes the mean and sends that to
all (all_gather). Codes are never added to codes, so nothing overflows, and each element is encoded
twice, however many ranks there are. All decode the same bytes, so that all have the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.cost_model import Message
from gradwire.errors import ArgumentError
from gradwire.hooks.compression.chain import chain
from gradwire.hooks.compression.compressor import Compressor, Reduction

__all__ = ["TwoPhase"]

CACHED = 1 << 18
"""Elements that are encoded or decoded at a time: with all of 6 million at once, each of some 25
ops passes through memory, and a step of int8 takes 1.5 times as long."""


class TwoPhase(Compressor):
    """A hook whose subclass says how blocks of floats become bytes, and bytes blocks.

    The owner of a share keeps what its code of the mean lacks, times W, as its own error: so that
    it arrives in the next mean.

    Args:
        block: How many elements are encoded together; a multiple of 8.
        group: The group; None: that of the module it is registered for.
        start: How many steps are averaged without compression, before the first with it.
    """

    def __init__(self, block: int, group: ProcessGroup | None = None, *, start: int = 0) -> None:
        super().__init__(group, start=start)
        if block < 8 or block % 8:
            raise ArgumentError(f"block is {block}: give a multiple of 8, such as 256")
        self.block = block

    @abstractmethod
    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Bytes of (n, block) floats: (n, b), uint8; not finite floats become such codes.

        Afterwards the blocks hold what the code lacks.
        """

    @abstractmethod
    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """The (n, block) floats that bytes stand for."""

    def generator(self, rank: int, step: int, bucket: int) -> torch.Generator | None:
        """The random numbers of one bucket's rounding, if there are any."""
        return None

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """All shares' codes, then the own share's."""
        numel, itemsize = self.extent(parameters)
        dtype = torch.float64 if itemsize == 8 else torch.float32
        code = self.encode(torch.zeros(1, self.block, dtype=dtype), self.generator(0, 0, 0)).numel()
        blocks = -(-numel // (world * self.block))
        return [
            Message("all_to_all", blocks * world * code),
            Message("all_gather", blocks * code),
        ]

    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Encode, all_to_all, mean, encode, all_gather."""
        wire, sent, block = reduction.wire, reduction.sent, self.block
        size = wire.size
        share = -(-sent.numel() // (size * block))  # in blocks
        generator = self.generator(wire.rank, step, reduction.bucket.index())
        code = torch.cat(
            [
                self._encode_part(sent[lo * block : hi * block], hi - lo, generator)
                for lo, hi in self._parts(share * size, sent)
            ]
        )

        def mean_of_share(received: Tensor) -> torch._C.Future[Tensor]:
            rows, first, own = received.view(size, share, -1), wire.rank * share, []
            for lo, hi in self._parts(share, sent):
                mean = self.decode(rows[0, lo:hi], sent.dtype)
                for row in rows[1:]:
                    mean += self.decode(row[lo:hi], sent.dtype)
                own.append(self.encode(mean.div_(size), generator))
                error = sent[(first + lo) * block : (first + hi) * block]
                error.add_(mean.view(-1)[: len(error)], alpha=size)
            return wire.all_gather(torch.cat(own))

        def finish(shares: Tensor) -> Tensor:
            rows = shares.view(size * share, -1)
            for lo, hi in self._parts(size * share, sent):
                error = sent[lo * block : hi * block]
                mean = self.decode(rows[lo:hi], sent.dtype).view(-1)
                reduction.put(lo * block, mean[: len(error)], error)
            return reduction.keep(sent)

        return chain(sent.device, wire.all_to_all(code.view(size, -1)), mean_of_share, finish)

    def _parts(self, blocks: int, like: Tensor) -> list[tuple[int, int]]:
        """What is worked on at a time: as many blocks as stay in a core's cache from op to op."""
        step = max(1, CACHED // self.block) if like.device.type == "cpu" else blocks
        return [(lo, min(lo + step, blocks)) for lo in range(0, blocks, step)]

    def _encode_part(self, part: Tensor, blocks: int, generator: torch.Generator | None) -> Tensor:
        """The code of so many blocks, filled up with zeros; the part then holds what it lacks."""
        if len(part) == blocks * self.block:
            return self.encode(part.view(blocks, -1), generator)
        filled = part.new_zeros(blocks, self.block)
        filled.view(-1)[: len(part)] = part
        code = self.encode(filled, generator)
        part.copy_(filled.view(-1)[: len(part)])
        return code
