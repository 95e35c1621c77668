"""The network, and one step of its training.

Nothing in it is random or depends on the other images of a batch (no dropout, no batch
normalization), so that a batch split over ranks must give the whole batch's gradients. tanh and
averages, unlike ReLU and maxima, have no corner at which a rounding error could become a large one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["build_model", "build_optimizer", "parameter_count", "train_step"]


def build_model(seed: int, device: torch.device) -> nn.Module:
    """The network with first parameters that follow from `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    ).to(device)


def build_optimizer(model: nn.Module, batch_size: int) -> torch.optim.Optimizer:
    """Plain SGD with momentum; small batches are noisy and take smaller steps."""
    return torch.optim.SGD(model.parameters(), lr=0.1 * min(1.0, batch_size / 64), momentum=0.9)


def parameter_count(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    weight: float,
) -> Tensor:
    """One step on these images, each of which counts `weight` in the loss; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") * weight
    loss.backward()
    optimizer.step()
    return loss.detach()
