"""A small network learns digits as well with compressing hooks as without a hook."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sklearn import datasets
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.local_sgd import diloco
from gradwire.testing import run_ranks

pytestmark = pytest.mark.wide

SEEDS = (0, 1, 2)
STEPS = 200
TEST = 360
HOOKS = {
    "int8": lambda: hooks.BlockQuantization(8),
    "int4": lambda: hooks.BlockQuantization(4),
    "stochastic": lambda: hooks.BlockQuantization(4, stochastic=True),
}


def learn(seed, step_of):
    """Return the accuracy on test images after `STEPS` steps."""
    digits = datasets.load_digits()
    shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(digits.images, dtype=torch.float32)[shuffled] / 8 - 1
    labels = torch.as_tensor(digits.target)[shuffled]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    model, optimizer = step_of(net)
    order = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(STEPS):
        chosen = torch.randint(TEST, len(labels), (32,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    with torch.no_grad():
        found = net(images[:TEST]).argmax(1)
    return (found == labels[:TEST]).float().mean().item()


def with_hook(make):
    def step_of(net):
        model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        model.register_comm_hook(None, make())
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return step_of


def with_outer_steps(net):
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, diloco(sgd, net.named_parameters(), every=10, lr=0.7, hook="int8", fragments=2)


def accuracies(step_of):
    return run_ranks(lambda: [learn(seed, step_of) for seed in SEEDS], 2)


@pytest.fixture(scope="module")
def plain():
    return run_ranks(lambda: [learn(s, with_hook(lambda: None)) for s in SEEDS], 2)[0]


@pytest.mark.parametrize("name", [*HOOKS, "outer"])
def test_accuracy_is_within_the_spread_of_plain_training(name, plain):
    step_of = with_outer_steps if name == "outer" else with_hook(HOOKS[name])
    first, second = accuracies(step_of)
    assert first == second
    spread = max(plain) - min(plain)
    assert spread < 0.06
    for seed, (found, want) in enumerate(zip(first, plain, strict=True)):
        assert abs(found - want) <= spread, (seed, first, plain)
