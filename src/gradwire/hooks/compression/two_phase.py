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


class TwoPhase(Compressor):
    """A hook whose subclass says how blocks of floats become bytes, and bytes blocks.

    The owner of a share keeps what its code of the mean lacks, times W, as its own error: so that
    it arrives in the next mean.

    Args:
        block: How many elements are encoded together; a multiple of 8.
        group: The group; None: the default one.
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
        numel, size = sent.numel(), wire.size
        share = -(-numel // (size * block)) * block
        over = share * size - numel
        error = torch.nn.functional.pad(sent, (0, over)) if over else sent
        generator = self.generator(wire.rank, step, reduction.bucket.index())
        code = self.encode(error.view(-1, block), generator)

        def mean_of_share(received: Tensor) -> torch._C.Future[Tensor]:
            every = self.decode(received.view(-1, code.shape[1]), sent.dtype)
            mean = every.view(size, -1).sum(0).div_(size).view(-1, block)
            own = self.encode(mean, generator)
            error.view(size, share)[wire.rank].add_(mean.view(-1), alpha=size)
            return wire.all_gather(own)

        def finish(shares: Tensor) -> Tensor:
            mean = self.decode(shares.view(-1, code.shape[1]), sent.dtype).view(-1)
            return reduction.finish(mean[:numel], error[:numel])

        return chain(sent.device, wire.all_to_all(code.view(size, -1)), mean_of_share, finish)
