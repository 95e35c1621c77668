"""The training on one rank, epoch by epoch beside its twin: the same in one process.

Ranks share each batch; the twin, which only rank 0 trains, takes it whole. If gradients are
communicated right, the two stay the same up to rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.cli.demo.data import Digits, batches
from gradwire.cli.demo.model import build_model, build_optimizer, train_step
from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.wrap import HOOKS, wrap_ours
from gradwire.cli.rank_env import RankEnv

__all__ = [
    "TOLERANCE",
    "Difference",
    "Epoch",
    "correct",
    "largest_difference",
    "same_bits",
    "train",
    "train_twin",
]

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """How far the parameters are from the twin's.

    Args:
        absolute: The largest difference of two numbers.
        relative: The largest length of a parameter's difference over the parameter's length.
    """

    absolute: float
    relative: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it (a NaN is never explained)."""
        return self.relative <= TOLERANCE


@dataclass(frozen=True)
class Epoch:
    """What rank 0, which has the twin, knows after an epoch.

    Args:
        number: Of the epoch, from 1.
        loss: The mean over the epoch's images and all ranks.
        correct: How many test images were recognized.
        difference: To the twin.
    """

    number: int
    loss: float
    correct: int
    difference: Difference


def train(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup,
    digits: Digits,
    on_epoch: Callable[[Epoch], None],
) -> tuple[nn.Module, Epoch | None]:
    """Train, and on rank 0 call `on_epoch` after each epoch.

    Returns:
        The trained model, and the last epoch on rank 0, where the twin is, or None elsewhere.
    """
    device = digits.train_images.device
    # Only rank 0's first parameters are the twin's: the others must receive them.
    model = build_model(options.seed + env.rank, device)
    wrapped = wrap_ours(model, group, HOOKS[options.hook])
    optimizer = build_optimizer(model, options.batch_size)
    twin = build_model(options.seed, device)
    twin_optimizer = build_optimizer(twin, options.batch_size)
    share = env.world_size / options.batch_size  # the mean over ranks is the mean over the batch

    epoch = None
    for number in range(1, options.epochs + 1):
        losses: list[Tensor] = []
        for batch in batches(options.seed, number, options.batch_size):
            mine = batch[env.rank :: env.world_size]
            images, labels = digits.train_images[mine], digits.train_labels[mine]
            losses.append(train_step(wrapped, optimizer, images, labels, share))
        loss = torch.stack(losses).mean() / env.world_size
        dist.all_reduce(loss, group=group)
        if env.rank == 0:
            train_twin(twin, twin_optimizer, digits, options.seed, number, options.batch_size)
            difference = largest_difference(model, twin)
            epoch = Epoch(number, loss.item(), correct(model, digits), difference)
            on_epoch(epoch)
    return model, epoch


def train_twin(
    twin: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    seed: int,
    epoch: int,
    batch_size: int,
) -> None:
    """One epoch of the training in one process, which takes each batch whole."""
    for batch in batches(seed, epoch, batch_size):
        images, labels = digits.train_images[batch], digits.train_labels[batch]
        train_step(twin, optimizer, images, labels, 1 / batch_size)


@torch.no_grad()
def correct(model: nn.Module, digits: Digits) -> int:
    """How many of the test images the model recognizes."""
    guesses = model(digits.test_images).argmax(dim=1)
    return int((guesses == digits.test_labels).sum())


@torch.no_grad()
def largest_difference(model: nn.Module, twin: nn.Module) -> Difference:
    """The difference of two models' parameters, pair by pair."""
    absolute, relative = [], []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        delta = ours - theirs
        absolute.append(delta.abs().max())
        relative.append(delta.norm() / theirs.norm())
    return Difference(torch.stack(absolute).max().item(), torch.stack(relative).max().item())


@torch.no_grad()
def same_bits(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether all ranks hold the same parameters, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    digests: list[str | None] = [None] * group.size()
    dist.all_gather_object(digests, digest.hexdigest(), group=group)
    return len(set(digests)) == 1
