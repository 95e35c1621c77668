"""Quantizing hooks: an all_reduce of codes, as 8- or 4-bit integers or as signs.

Every rank encodes its gradients and sends one share of the codes to each rank (all_to_all). Each
rank decodes the codes of its share, sums them in rank order in floating point, encodes the mean and
sends it to all ranks (all_gather). Codes are never added to codes, so nothing overflows, and each
element is encoded twice for any number of ranks. All ranks decode the same bytes to the same bits.
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
"""Number of elements that are encoded or decoded at a time, so that they stay in a core's cache.

With 6 million elements at once, a step of int8 takes 1.5 times as long.
"""


class TwoPhase(Compressor):
    """Base of hooks that encode blocks of floats as bytes.

    The rank that sums a share adds the rounding error of the encoded mean, times W, to its own
    error, so that it arrives in the next mean.

    Args:
        block: Number of elements that are encoded together, a multiple of 8.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.
    """

    def __init__(self, block: int, group: ProcessGroup | None = None, *, start: int = 0) -> None:
        super().__init__(group, start=start)
        if block < 8 or block % 8:
            raise ArgumentError(f"block is {block}: pass a multiple of 8, such as 256")
        self.block = block

    @abstractmethod
    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode (n, block) floats as (n, b) uint8, and subtract the decoded values from `blocks`.

        Blocks with values that are not finite must decode to values that are not finite.
        """

    @abstractmethod
    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode (n, b) bytes to (n, block) floats."""

    def generator(self, rank: int, step: int, bucket: int) -> torch.Generator | None:
        """Return the random number generator for rounding one bucket, or None."""
        return None

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """Return an all_to_all of all shares' codes, and an all_gather of one share's."""
        numel, itemsize = self.extent(parameters)
        dtype = torch.float64 if itemsize == 8 else torch.float32
        code = self.encode(torch.zeros(1, self.block, dtype=dtype), self.generator(0, 0, 0)).numel()
        blocks = -(-numel // (world * self.block))
        return [
            Message("all_to_all", blocks * world * code),
            Message("all_gather", blocks * code),
        ]

    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Encode, all_to_all, average, encode, all_gather."""
        wire, sent, block = reduction.wire, reduction.sent, self.block
        size = wire.size
        share = -(-sent.numel() // (size * block))  # number of blocks
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
        """Divide blocks into ranges that stay in a core's cache from one op to the next."""
        step = max(1, CACHED // self.block) if like.device.type == "cpu" else blocks
        return [(lo, min(lo + step, blocks)) for lo in range(0, blocks, step)]

    def _encode_part(self, part: Tensor, blocks: int, generator: torch.Generator | None) -> Tensor:
        """Encode a part, padded with zeros to whole blocks, and leave the rounding error in it."""
        if len(part) == blocks * self.block:
            return self.encode(part.view(blocks, -1), generator)
        filled = part.new_zeros(blocks, self.block)
        filled.view(-1)[: len(part)] = part
        code = self.encode(filled, generator)
        part.copy_(filled.view(-1)[: len(part)])
        return code


LARGEST = {8: 127, 4: 7}
"""Largest integer of a code, by its number of bits. The smallest is its negative."""


class BlockQuantization(TwoPhase):
    """Average in 8 or 4 bits per element, quantized in blocks with one scale each.

    A block's largest magnitude is encoded as the largest integer. Ranks exchange codes by
    all_to_all, sum in float32, encode again, and all_gather. The rounding error is kept for the
    next step. A NaN or an infinity makes its whole block NaN or infinite on every rank; the errors
    of that step are then not kept.

    Args:
        bits: Number of bits, 8 or 4.
        block: Number of elements that share a scale, a multiple of 8.
        stochastic: True for unbiased stochastic rounding, False for rounding to nearest.
        seed: Seed from which the random numbers of each rank, step and bucket are derived.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.

    Raises:
        ArgumentError: `bits` is not 8 or 4, or `block` is not a multiple of 8.

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
        qgZ of ZeRO++, G. Wang et al., arXiv 2306.10209; stochastic rounding of QSGD, D. Alistarh et
        al., arXiv 1610.02132.
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
            raise ArgumentError(f"bits is {bits}: pass 8 or 4")
        super().__init__(block, group, start=start)
        self.bits, self.stochastic, self.seed = bits, stochastic, seed

    def generator(self, rank: int, step: int, bucket: int) -> torch.Generator | None:
        """Return a generator seeded by the arguments only, so that a resumed run rounds alike."""
        if not self.stochastic:
            return None
        mixed = hashlib.blake2b(f"{self.seed} {rank} {step} {bucket}".encode(), digest_size=7)
        return torch.Generator().manual_seed(int.from_bytes(mixed.digest(), "little"))

    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode as integers, followed by the block's scale."""
        largest = LARGEST[self.bits]
        # faster than one reduction of magnitudes, which would be written to memory first
        highest, lowest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
        scales = torch.maximum(highest, lowest.neg_()).div_(largest)
        # avoids division by zero for a block of zeros; NaN stays NaN
        scales.clamp_min_(torch.finfo(blocks.dtype).tiny)
        integers = blocks / scales
        if generator is None:
            integers.round_()
        else:
            noise = torch.rand(blocks.shape, dtype=blocks.dtype, generator=generator)
            # the quotient may exceed the largest integer by a rounding error
            integers.add_(noise.to(blocks.device)).floor_().clamp_(-largest, largest)
        blocks.addcmul_(integers, scales, value=-1)
        # the integer for NaN is undefined, but the block's scale is then NaN, too
        codes = integers.to(torch.int8)
        packed = codes.view(torch.uint8) if self.bits == 8 else _pack_halves(codes)
        return torch.cat((packed, scales.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode as integers times the block's scale."""
        split = self.block * self.bits // 8
        scales = values_in(code[:, split:], dtype)
        if self.bits == 8:
            return values_in(code[:, :split], torch.int8).to(dtype).mul_(scales)
        return looked_up(_pairs(code.device, dtype), code[:, :split]).mul_(scales)


def _pack_halves(codes: Tensor) -> Tensor:
    """Pack two integers from -7 to 7 into each byte, the first in the lower half."""
    pairs = (codes + 8).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two integers of each of the 256 bytes."""
    byte = torch.arange(256, dtype=torch.int64, device=device)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), 1).to(dtype)


class Sign(TwoPhase):
    """Average in one bit per element: signs, scaled by the mean magnitude of their block.

    Ranks exchange codes by all_to_all, sum in float32, encode again, and all_gather. Convergence
    depends on error feedback. A NaN or an infinity makes its whole block NaN or infinite on every
    rank; the errors of that step are then not kept.

    Args:
        block: Number of elements that share a magnitude, a multiple of 8.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.

    Raises:
        ArgumentError: `block` is not a multiple of 8.

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
        EF-SignSGD, S. P. Karimireddy et al., arXiv 1901.09847; compression in both phases as in
        DoubleSqueeze, H. Tang et al., arXiv 1905.05957.
    """

    def __init__(
        self, *, block: int = 256, group: ProcessGroup | None = None, start: int = 0
    ) -> None:
        super().__init__(block, group, start=start)

    def encode(self, blocks: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode as one bit per element, followed by the block's mean magnitude."""
        means = blocks.abs().mean(1, keepdim=True)
        negative = blocks.signbit()
        blocks.sub_(torch.copysign(means, blocks))
        return torch.cat((_pack_bits(negative), means.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode as signs times the block's mean magnitude."""
        split = self.block // 8
        means = values_in(code[:, split:], dtype)
        return looked_up(_signs(code.device, dtype), code[:, :split]).mul_(means)


def _pack_bits(negative: Tensor) -> Tensor:
    """Pack eight booleans into each byte, the first in the lowest bit."""
    eight = negative.view(torch.uint8).view(torch.int64)  # one byte per boolean
    # The factor has bits at 56 - 7 i, so that the product has the bit of byte i at 56 + i. No two
    # products of bits have the same position, so there is no carry.
    return (eight.mul_(0x0102040810204080) >> 56).to(torch.uint8)


def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the eight signs of each of the 256 bytes."""
    byte, bit = (torch.arange(n, dtype=torch.int64, device=device) for n in (256, 8))
    return (1 - (byte[:, None] >> bit & 1) * 2).to(dtype)
