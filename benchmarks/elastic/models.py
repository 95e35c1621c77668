"""Model of the recovery benchmark: 6 linear layers of 512 × 512, 64 samples per step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "MEMBERS", "data", "model"]

MEMBERS, BATCH, WIDTH, LAYERS = 2, 64, 512, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def data() -> Tensor:
    return torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0))
