"""The handwritten digits that come with scikit-learn, split and shuffled the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.cli.demo.options import TEST_IMAGES, TRAIN_IMAGES

__all__ = ["TEST_IMAGES", "TRAIN_IMAGES", "Digits", "batches", "load_digits"]


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), values from -1 to 1, with their digits of shape (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int, device: torch.device) -> Digits:
    """Load the digits; `seed` decides which ones are kept for the test."""
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
    """The training images' numbers in one epoch's order, `batch_size` at a time.

    Images that do not fill a last batch are left out; another epoch leaves out others.
    """
    shuffle = torch.Generator().manual_seed(seed + 1 + epoch)
    order = torch.randperm(TRAIN_IMAGES, generator=shuffle)
    for start in range(0, TRAIN_IMAGES - batch_size + 1, batch_size):
        yield order[start : start + batch_size]
