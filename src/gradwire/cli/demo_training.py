"""The demo on one rank: training, and its twin in one process.

Each rank trains on its share of a batch. The twin, on rank 0, trains on the whole batch. Correctly
averaged gradients give parameters that differ from the twin's only by rounding: nothing in the
network is random or depends on other images of a batch, and tanh and averages, unlike ReLU and
maxima, have no corner at which a rounding error could become a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire._digest import digest
from gradwire.ddp import DistributedDataParallel

_TEST = 360


@dataclass(frozen=True)
class Result:
    """Result of the demo on one rank."""

    digest: bytes
    relative: float  # largest relative difference to the twin, on rank 0


def run(
    epochs: int, batch: int, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
) -> Result:
    """Train, and print each epoch on rank 0; call it on each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits()
    model, twin = network(rank), network(0)  # the wrapper gives all ranks the parameters of rank 0
    step = steps_of(wrap(model), world / batch)
    twin_step = steps_of(twin, 1 / batch)
    relative = 0.0
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(labels) - _TEST, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for chosen in order[: len(order) // batch * batch].add(_TEST).split(batch):
            mine = chosen[rank::world]
            losses.append(step(images[mine], labels[mine]))
            if rank == 0:
                twin_step(images[chosen], labels[chosen])
        loss = torch.stack(losses).mean() / world
        dist.all_reduce(loss)
        if rank == 0:
            with torch.no_grad():
                guesses = model(images[:_TEST]).argmax(1)
                pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
                absolute = max((a - b).abs().max().item() for a, b in pairs)
                # a tensor's max keeps NaN, where Python's may not
                relative = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()
            right = (guesses == labels[:_TEST]).float().mean().item()
            line = f"{f'{epoch}/{epochs}':>8}   {loss.item():6.4f}   {right:>13.1%}   "
            print(f"{line}{absolute:>30.1e}", flush=True)
    return Result(digest(model.parameters()), relative)


def load_digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (n, 1, 8, 8) with values from -1 to 1, and their digits."""
    from sklearn import datasets

    bundle = datasets.load_digits()
    images = torch.as_tensor(bundle.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.as_tensor(bundle.target, dtype=torch.int64)[order]


def network(seed: int) -> nn.Module:
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
    )


def steps_of(model: nn.Module, weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that trains one step and returns the loss; each image has a `weight`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") * weight
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
