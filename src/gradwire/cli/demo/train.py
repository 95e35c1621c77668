"""Training on one rank, and its twin: the same training in one process.

Each rank trains on its share of a batch. The twin, on rank 0, trains on the whole batch. Correctly
averaged gradients give parameters that differ from the twin's only by rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.task import Digits, batches, build_model, build_optimizer, train_step
from gradwire.cli.demo.wrap import wrap_ours
from gradwire.cli.rank_env import RankEnv

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """Difference between the parameters and the twin's.

    Args:
        absolute: Largest difference of two scalars.
        relative: Largest norm of a parameter's difference over the parameter's norm.
    """

    absolute: float
    relative: float

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference; NaN is never explained."""
        return self.relative <= TOLERANCE


@dataclass(frozen=True)
class Epoch:
    """Result of an epoch on rank 0, which has the twin.

    Args:
        number: Number of the epoch, from 1.
        loss: Mean loss over the epoch's images and all ranks.
        correct: Number of correctly classified test images.
        difference: Difference to the twin.
    """

    number: int
    loss: float
    correct: int
    difference: Difference


def train(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup | None,
    digits: Digits,
    on_epoch: Callable[[Epoch], None],
) -> tuple[nn.Module, Epoch | None]:
    """Train, and call `on_epoch` on rank 0 after each epoch.

    Returns:
        The trained model, and the last epoch on rank 0 or None elsewhere.
    """
    device = digits.train_images.device
    # only rank 0 starts with the twin's parameters: the others receive them
    model = build_model(options.seed + env.rank, device)
    wrapped = wrap_ours(model, options, group)
    twin = build_model(options.seed, device)
    optimizer, twin_optimizer = (build_optimizer(m, options.batch_size) for m in (model, twin))
    epoch = None
    for number in range(1, options.epochs + 1):
        losses: list[Tensor] = []
        for batch in batches(options.seed, number, options.batch_size):
            images, labels = digits.train_images[batch], digits.train_labels[batch]
            mine = slice(env.rank, None, env.world_size)
            # DistributedDataParallel averages over ranks, so this gives the mean over the batch
            weight = env.world_size / options.batch_size
            losses.append(train_step(wrapped, optimizer, images[mine], labels[mine], weight))
            if env.rank == 0:
                train_step(twin, twin_optimizer, images, labels, 1 / options.batch_size)
        loss = torch.stack(losses).mean() / env.world_size
        if group is not None:
            dist.all_reduce(loss, group=group)
        if env.rank == 0:
            difference = largest_difference(model, twin)
            epoch = Epoch(number, loss.item(), correct(model, digits), difference)
            on_epoch(epoch)
    return model, epoch


@torch.no_grad()
def correct(model: nn.Module, digits: Digits) -> int:
    """Return the number of test images that the model classifies correctly."""
    guesses = model(digits.test_images).argmax(dim=1)
    return int((guesses == digits.test_labels).sum())


@torch.no_grad()
def largest_difference(model: nn.Module, twin: nn.Module) -> Difference:
    """Return the largest difference between two models' parameters."""
    absolute, relative = [], []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        delta = ours - theirs
        absolute.append(delta.abs().max())
        relative.append(delta.norm() / theirs.norm())
    return Difference(torch.stack(absolute).max().item(), torch.stack(relative).max().item())


@torch.no_grad()
def same_bits(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Return True if all ranks have bitwise equal parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    digests: list[str | None] = [None] * group.size()
    dist.all_gather_object(digests, digest.hexdigest(), group=group)
    return len(set(digests)) == 1
