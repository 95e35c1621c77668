"""A convolution of images whose rows are divided over ranks.

At its edges a slab needs rows of its neighbours: `halo_exchange` brings them, and in backward adds
their gradients to those of their owners.

Source: N. Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained
Parallelism", 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.collectives import halo_exchange

__all__ = ["HaloConv2d"]

ROWS = 2


class HaloConv2d(nn.Module):
    """A stride-1 convolution that keeps the image's size.

    Args:
        whole: The layer to take the weights from, the same on all ranks; its kernel has an odd
            size, and its padding is "same".
        group: The ranks that hold the images' rows, from top to bottom.
    """

    def __init__(self, whole: nn.Conv2d, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.group = whole.weight, whole.bias, group

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, this rank's rows, width); the result has other channels."""
        up, across = (size // 2 for size in self.weight.shape[2:])
        slab = halo_exchange(x, up, ROWS, group=self.group)
        return F.conv2d(slab, self.weight, self.bias, padding=(0, across))
