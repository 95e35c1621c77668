"""Gradients as their signs, one bit each, with the mean magnitude of each block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.hooks.compression.two_phase import TwoPhase
from gradwire.hooks.compression.wire import looked_up, values_in

__all__ = ["Sign"]


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
        return torch.cat((_pack(negative), means.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean magnitude, with the signs."""
        split = self.block // 8
        means = values_in(code[:, split:], dtype)
        return looked_up(_signs(code.device, dtype), code[:, :split]).mul_(means)


def _pack(negative: Tensor) -> Tensor:
    """Eight booleans in each byte, the first in its lowest bit."""
    eight = negative.view(torch.uint8).view(torch.int64)  # a byte each
    # the product has byte i's bit at 56 + i, for each of the factor's bits at 56 - 7 i; no two of
    # all products of bits lie at the same place, so that nothing is carried
    return (eight.mul_(0x0102040810204080) >> 56).to(torch.uint8)


def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The eight signs in each byte."""
    byte, place = (torch.arange(n, dtype=torch.int64, device=device) for n in (256, 8))
    return (1 - (byte[:, None] >> place & 1) * 2).to(dtype)
