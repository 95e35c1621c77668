"""The training of one rank, and beside it its twin: the same training in one process.

Each rank trains on its share of a batch, the twin, on rank 0 alone, on all of it. If the gradients
are averaged correctly, the parameters of both differ by rounding only.
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
    """The result of an epoch, on rank 0, where the twin is.

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
    group: dist.ProcessGroup | None,
    digits: Digits,
    on_epoch: Callable[[Epoch], None],
) -> tuple[nn.Module, Epoch | None]:
    """Train, and on rank 0 call `on_epoch` after each epoch.

    Returns:
        The trained model, and the last epoch on rank 0, where the twin is, or None elsewhere.
    """
    device = digits.train_images.device
    # only rank 0 starts with the twin's parameters: the others have to receive them
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
            # DistributedDataParallel averages over ranks: the mean over the batch is wanted
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
