"""Batch norm over the whole batch, of which each rank holds a share.

`mean` and `var` over the ranks are all it takes: what of their gradient belongs to other ranks'
samples goes there, and shares of different sizes count each sample the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.collectives import mean, var

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.BatchNorm2d):
    """torch.nn.BatchNorm2d, with the statistics of all ranks.

    Args:
        features: Channels.
        group: The ranks that hold the batch.
    """

    def __init__(self, features: int, group: ProcessGroup | None = None, **options: float) -> None:
        super().__init__(features, **options)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w), n differing by rank; the result has the same shape."""
        if not self.training:
            return super().forward(x)
        dims = (0, 2, 3)
        centre = mean(x, dims, keepdim=True, group=self.group)
        spread = var(x, dims, correction=0, keepdim=True, group=self.group)
        with torch.no_grad():
            self.running_mean.lerp_(centre.flatten(), self.momentum)
            self.running_var.lerp_(var(x, dims, group=self.group), self.momentum)
            self.num_batches_tracked += 1
        out = (x - centre) / (spread + self.eps).sqrt()
        return out * self.weight[:, None, None] + self.bias[:, None, None]
