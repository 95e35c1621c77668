"""The demo's task: handwritten digits, and a small network that learns to read them.

The digits come with scikit-learn, and are split and shuffled alike on every rank.

Nothing in the network is random or depends on the other images of a batch (no dropout, no batch
normalization), so that a batch split over ranks must give the whole batch's gradients. tanh and
averages, unlike ReLU and maxima, have no corner at which a rounding error could become a large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.cli.demo.options import TEST_IMAGES, TRAIN_IMAGES


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), values from -1 to 1, with their digits of shape (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int, device: torch.device) -> Digits:
    """Load the digits; `seed` selects the test images."""
    from sklearn import datasets

    bundle = datasets.load_digits()
    order = torch.randperm(len(bundle.target), generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(bundle.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    labels = torch.as_tensor(bundle.target, dtype=torch.int64)[order]
    assert len(images) == TRAIN_IMAGES + TEST_IMAGES
    images, labels = images.to(device), labels.to(device)
    return Digits(
        images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]
    )


def batches(seed: int, epoch: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the indices of training images in one epoch's order, `batch_size` at a time.

    An incomplete last batch is dropped; each epoch drops different images.
    """
    shuffle = torch.Generator().manual_seed(seed + 1 + epoch)
    order = torch.randperm(TRAIN_IMAGES, generator=shuffle)
    for start in range(0, TRAIN_IMAGES - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def build_model(seed: int, device: torch.device) -> nn.Module:
    """Return the network with initial parameters from `seed`."""
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
    """Return SGD with momentum; the learning rate is smaller for small, noisy batches."""
    return torch.optim.SGD(model.parameters(), lr=0.1 * min(1.0, batch_size / 64), momentum=0.9)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trained scalars."""
    return sum(parameter.numel() for parameter in model.parameters())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    weight: float,
) -> Tensor:
    """Train one step on images that each have a `weight` in the loss; return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") * weight
    loss.backward()
    optimizer.step()
    return loss.detach()
