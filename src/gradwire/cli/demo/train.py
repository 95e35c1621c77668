"""Training on one rank, and its twin: the same training in one process.

Each rank trains on its share of a batch. The twin, on rank 0, trains on the whole batch. Correctly
averaged gradients give parameters that differ from the twin's only by rounding.

The task is to read handwritten digits, which come with scikit-learn. They are split and shuffled
alike on every rank.

Nothing in the network is random or depends on the other images of a batch (no dropout, no batch
normalization), so that a batch split over ranks must give the whole batch's gradients. tanh and
averages, unlike ReLU and maxima, have no corner at which a rounding error could become a large one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import hooks
from gradwire.cli.demo.options import TEST_IMAGES, TRAIN_IMAGES, DemoOptions
from gradwire.cli.launch import RankEnv
from gradwire.ddp import DistributedDataParallel
from gradwire.devices import DataParallel

BUCKET_CAP_MB = 0.25  # small network: two buckets overlap communication with computation


@dataclass(frozen=True)
class Hook:
    """Communication hook of the demo.

    Args:
        ours: Hook of gradwire's class.
        torch: Hook of torch's class.
        lossy: True if gradients are compressed.
        torch_limit: Reason why torch's class cannot run it on CPU tensors; "" if it can.
        state: Function that makes both hooks' state of the group.
    """

    ours: Callable[..., Any]
    torch: Callable[..., Any]
    lossy: bool
    torch_limit: str = ""
    state: Callable[[dist.ProcessGroup], Any] = lambda group: group


def _power_sgd(group: dist.ProcessGroup) -> power_sgd.PowerSGDState:
    return power_sgd.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=10)


_ALONE, _SEVERAL = "rejects it without NCCL", "hangs in it on Gloo when there are several buckets"
_PSGD = power_sgd.powerSGD_hook
HOOKS: dict[str, Hook | None] = {
    "none": None,
    "all_reduce": Hook(hooks.all_reduce, torch_hooks.allreduce_hook, lossy=False),
    "fp16": Hook(hooks.fp16, torch_hooks.fp16_compress_hook, lossy=True),
    "bf16": Hook(hooks.bf16, torch_hooks.bf16_compress_hook, lossy=True, torch_limit=_ALONE),
    "powersgd": Hook(_PSGD, _PSGD, lossy=True, torch_limit=_SEVERAL, state=_power_sgd),
}


def is_lossy(options: DemoOptions) -> bool:
    """Return True if the hook compresses gradients."""
    hook = HOOKS[options.hook]
    return hook is not None and hook.lossy


def torch_limit(options: DemoOptions) -> str:
    """Return the reason why torch's class cannot run the hook on CPU tensors; "" if it can."""
    hook = HOOKS[options.hook]
    return "" if hook is None else hook.torch_limit


def wrap_ours(model: nn.Module, options: DemoOptions, group: dist.ProcessGroup | None) -> nn.Module:
    """Wrap a model in gradwire's DistributedDataParallel, or in DataParallel without a group."""
    if group is None:
        return DataParallel(model, ["cpu"] * options.shares)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_CAP_MB)
    if (hook := HOOKS[options.hook]) is not None:
        wrapped.register_comm_hook(hook.state(group), hook.ours)
    return wrapped


def wrap_torch(
    model: nn.Module, options: DemoOptions, group: dist.ProcessGroup | None
) -> nn.Module | None:
    """Wrap a model in torch's DistributedDataParallel; None if it cannot run the hook on the CPU.

    Also None without a group, since torch's DataParallel does not run on the CPU.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    if group is None or (torch_limit(options) and on_cpu):
        return None
    wrapped = TorchDDP(model, process_group=group, bucket_cap_mb=BUCKET_CAP_MB)
    if (hook := HOOKS[options.hook]) is not None:
        wrapped.register_comm_hook(hook.state(group), hook.torch)
    return wrapped


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
