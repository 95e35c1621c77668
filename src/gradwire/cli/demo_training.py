"""The demo on one rank: training, its twin in one process, and times of steps.

Each rank trains on its share of a batch. The twin, on rank 0, trains on the whole batch. Correctly
averaged gradients give parameters that differ from the twin's only by rounding: nothing in the
network is random or depends on other images of a batch, and tanh and averages, unlike ReLU and
maxima, have no corner at which a rounding error could become a large one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire._digest import digest
from gradwire.ddp import DistributedDataParallel

_TEST = 360
_BUCKET_MB = 0.25  # two buckets overlap communication with computation
_WARM_UP, _TIMED = 15, 100  # first steps allocate memory and assign buckets again


@dataclass(frozen=True)
class Result:
    """Result of the demo on one rank."""

    digest: bytes
    relative: float  # largest relative difference to the twin, on rank 0
    times: dict[str, float]


def run(
    backend: str,
    epochs: int,
    batch: int,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Result:
    """Train, print each epoch on rank 0, and time steps; call it on each rank."""
    wrap = wrap or partial(DistributedDataParallel, bucket_cap_mb=_BUCKET_MB)
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
    share = torch.arange(_TEST + rank, _TEST + batch, world, dtype=torch.int64)
    times = time_steps(backend, wrap, images[share], labels[share])
    return Result(digest(model.parameters()), relative, times)


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


def time_steps(
    backend: str, wrap: Callable[[nn.Module], nn.Module], images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Return median seconds of a step of the slowest rank: bare, gradwire's, and PyTorch's.

    Steps alternate, so that other work on the machine slows all of them equally.
    """
    models = {
        "without communication": network(0),
        "gradwire": wrap(network(0)),
        f"PyTorch's class on {backend}": TorchDDP(network(0), bucket_cap_mb=_BUCKET_MB),
    }
    if backend != "gloo":
        gloo = dist.new_group(backend="gloo")
        wrapped = TorchDDP(network(0), process_group=gloo, bucket_cap_mb=_BUCKET_MB)
        models["PyTorch's class on gloo"] = wrapped
    steps = [steps_of(model, 1 / len(labels)) for model in models.values()]
    rounds = torch.empty(_WARM_UP + _TIMED, len(steps), dtype=torch.float64)
    for number in range(len(rounds)):
        for place in range(len(steps)):
            which = (place + number) % len(steps)  # rotate the order of models
            dist.barrier()
            start = time.perf_counter()
            steps[which](images, labels)
            rounds[number, which] = time.perf_counter() - start
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    medians = rounds[_WARM_UP:].median(dim=0).values.tolist()
    return dict(zip(models, medians, strict=True))
