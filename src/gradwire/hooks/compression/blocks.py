"""Gradients as 8- or 4-bit integers, with a scale for each block of them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError
from gradwire.hooks.compression.two_phase import TwoPhase
from gradwire.hooks.compression.wire import looked_up, values_in

__all__ = ["BlockQuantization"]

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
        packed = codes.view(torch.uint8) if self.bits == 8 else _pack(codes)
        return torch.cat((packed, scales.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers times their block's scale."""
        split = self.block * self.bits // 8
        scales = values_in(code[:, split:], dtype)
        if self.bits == 8:
            return values_in(code[:, :split], torch.int8).to(dtype).mul_(scales)
        return looked_up(_pairs(code.device, dtype), code[:, :split]).mul_(scales)


def _pack(codes: Tensor) -> Tensor:
    """Two integers from -7 to 7 in each byte, the first in its lower half."""
    pairs = (codes + 8).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two integers in each byte."""
    byte = torch.arange(256, dtype=torch.int64, device=device)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), 1).to(dtype)
