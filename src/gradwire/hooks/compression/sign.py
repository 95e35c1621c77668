"""Gradients as their signs, one bit each, with the mean magnitude of each block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.hooks.compression.two_phase import TwoPhase
from gradwire.hooks.compression.wire import values_in

__all__ = ["Sign"]


class Sign(TwoPhase):
    """Average in one bit an element: signs, times the mean magnitude of their block.

    Ranks exchange codes by all_to_all, add in float32, encode again, and all_gather. Without its
    error feedback this would not converge. A NaN or an infinity makes all of its block not finite,
    on every rank; then nothing is kept of that step.

    Args:
        block: How many elements share a magnitude; a multiple of 8.
        group: The group; None: the default one.
        start: How many steps are averaged without compression, before the first with it.

    Raises:
        ArgumentError: `block` is no multiple of 8.

    Example:
        The error of one step arrives in the next ones:

        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        ...     net.register_comm_hook(None, Sign(block=8))
        ...     total = torch.zeros(1, 2)
        ...     for _ in range(200):
        ...         net.zero_grad()
        ...         net(torch.tensor([[1.0, 3.0]])).sum().backward()
        ...         total += net.module.weight.grad
        ...     return (total / 200).round(decimals=1).tolist()
        >>> run_ranks(main, world_size=2)
        [[[1.0, 3.0]], [[1.0, 3.0]]]

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
        bits = (blocks >= 0).to(torch.uint8).view(len(blocks), -1, 8)
        packed = (bits << _places(bits)).sum(-1, dtype=torch.uint8)
        means = blocks.abs().mean(1, keepdim=True)
        return torch.cat((packed, means.view(torch.uint8)), 1)

    def decode(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean magnitude, with the signs."""
        split = self.block // 8
        means = values_in(code[:, split:], dtype)
        bits = (code[:, :split, None] >> _places(code)) & 1
        return bits.view(len(code), -1).to(dtype).mul_(2).sub_(1).mul_(means)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
