"""An all_reduce of codes: each rank sums a share of the bucket, in floats, and sends it to all.

Every rank encodes its gradients and sends each share to the rank that owns it (all_to_all); the
owner decodes what it got from all, adds it up in rank order, encodes the mean and sends that to
all (all_gather). Codes are never added to codes, so nothing overflows, and each element is encoded
twice, however many ranks there are. All decode the same bytes, so that all have the same bits.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.compression.compressor import Compressor, Reduction
from gradwire.hooks.compression.wire import Message, looked_up, values_in
from gradwire.hooks.result import chain

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


LARGEST = {8: 127, 4: 7}
"""Of a code's integers, by its bits; its negative is the smallest."""


class BlockQuantization(TwoPhase):
    """Average in 8 or 4 bits an element, rounded in blocks that have a scale each.

    A block's largest magnitude becomes the largest integer. Ranks exchange codes by all_to_all,
    add in float32, encode again, and all_gather. What rounding leaves is kept for the next step.
    A NaN or an infinity makes all of its block not finite, on every rank; then nothing is kept of
    that step.

    Args:
        bits: 8 or 4.
        block: How many elements share a scale: an even number, a multiple of 8.
        stochastic: Round up or down at random, so that the mean of many roundings is the value
            itself; if not, to the nearest.
        seed: Of the random numbers; those of a rank, step and bucket follow from it.
        group: The group; None: that of the module it is registered for.
        start: How many steps are averaged without compression, before the first with it.

    Raises:
        ArgumentError: `bits` is another number, or `block` no multiple of 8.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, BlockQuantization(8))
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2
        [1.5, 1.5]

    Source:
        ZeRO++'s qgZ, G. Wang et al., arXiv 2306.10209; stochastic rounding as QSGD, D. Alistarh
        et al., arXiv 1610.02132.
    """

    def __init__(
        self,
        bits: int = 8,
        *,
        block: int = 256,
        stochastic: bool = False,
        seed: int = 0,
        group: ProcessGroup | None = None,
        start: int = 0,
    ) -> None:
        if bits not in LARGEST:
            raise ArgumentError(f"bits is {bits}: give 8 or 4")
        super().__init__(block, group, start=start)
        self.bits, self.stochastic, self.seed = bits, stochastic, seed

    def generator(self, rank: int, step: int, bucket: int) -> torch.Generator | None:
        """Follows from the arguments alone, so that a resumed run rounds as an uninterrupted."""
        if not self.stochastic:
            return None
        mixed = hashlib.blake2b(f"{self.seed} {rank} {step} {bucket}".encode(), digest_size=7)
        return torch.Generator().manual_seed(int.from_bytes(mixed.digest(), "little"))

    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Integers, then the block's scale."""
        largest = LARGEST[self.bits]
        # two reductions that read take less than one of magnitudes, which are written first
        highest, lowest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
        scales = torch.maximum(highest, lowest.neg_()).div_(largest)
        # a block of zeros has a scale, too; NaN stays NaN
        scales.clamp_min_(torch.finfo(blocks.dtype).tiny)
        integers = blocks / scales
        if generator is None:
            integers.round_()
        else:
            noise = torch.rand(blocks.shape, dtype=blocks.dtype, generator=generator)
            # the quotient may be a rounding error above the largest, and would be one more
            integers.add_(noise.to(blocks.device)).floor_().clamp_(-largest, largest)
        blocks.addcmul_(integers, scales, value=-1)
        # what NaN becomes is undefined: its scale says that the block is not finite
        codes = integers.to(torch.int8)
        packed = codes.view(torch.uint8) if self.bits == 8 else _pack_halves(codes)
        return torch.cat((packed, scales.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers times their block's scale."""
        split = self.block * self.bits // 8
        scales = values_in(code[:, split:], dtype)
        if self.bits == 8:
            return values_in(code[:, :split], torch.int8).to(dtype).mul_(scales)
        return looked_up(_pairs(code.device, dtype), code[:, :split]).mul_(scales)


def _pack_halves(codes: Tensor) -> Tensor:
    """Two integers from -7 to 7 in each byte, the first in its lower half."""
    pairs = (codes + 8).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two integers in each byte."""
    byte = torch.arange(256, dtype=torch.int64, device=device)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), 1).to(dtype)


class Sign(TwoPhase):
    """Average in one bit an element: signs, times the mean magnitude of their block.

    Ranks exchange codes by all_to_all, add in float32, encode again, and all_gather. Without its
    error feedback this would not converge. A NaN or an infinity makes all of its block not finite,
    on every rank; then nothing is kept of that step.

    Args:
        block: How many elements share a magnitude; a multiple of 8.
        group: The group; None: that of the module it is registered for.
        start: How many steps are averaged without compression, before the first with it.

    Raises:
        ArgumentError: `block` is no multiple of 8.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
        ...     net.register_comm_hook(None, Sign(block=8))
        ...     net(torch.tensor([[2.0, -2, 2, -2, 6, -6, 6, -6]])).sum().backward()
        ...     return net.module.weight.grad.tolist()
        >>> run_ranks(main, world_size=2)[0]  # the rest is kept for the next step
        [[4.0, -4.0, 4.0, -4.0, 4.0, -4.0, 4.0, -4.0]]

    Source:
        EF-SignSGD, S. P. Karimireddy et al., arXiv 1901.09847; both ways, as DoubleSqueeze,
        H. Tang et al., arXiv 1905.05957.
    """

    def __init__(
        self, *, block: int = 256, group: ProcessGroup | None = None, start: int = 0
    ) -> None:
        super().__init__(block, group, start=start)

    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """A bit each, then the block's mean magnitude."""
        means = blocks.abs().mean(1, keepdim=True)
        negative = blocks.signbit()
        blocks.sub_(torch.copysign(means, blocks))
        return torch.cat((_pack_bits(negative), means.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean magnitude, with the signs."""
        split = self.block // 8
        means = values_in(code[:, split:], dtype)
        return looked_up(_signs(code.device, dtype), code[:, :split]).mul_(means)


def _pack_bits(negative: Tensor) -> Tensor:
    """Eight booleans in each byte, the first in its lowest bit."""
    eight = negative.view(torch.uint8).view(torch.int64)  # a byte each
    # the product has byte i's bit at 56 + i, for each of the factor's bits at 56 - 7 i; no two of
    # all products of bits lie at the same place, so that nothing is carried
    return (eight.mul_(0x0102040810204080) >> 56).to(torch.uint8)


def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The eight signs in each byte."""
    byte, place = (torch.arange(n, dtype=torch.int64, device=device) for n in (256, 8))
    return (1 - (byte[:, None] >> place & 1) * 2).to(dtype)
