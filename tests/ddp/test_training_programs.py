"""Programs that PyTorch's class trains correctly: no check may stop them or change a gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import average_used, on_ranks
from gradwire.ddp import DistributedDataParallel


class Naive(nn.Module):
    """What the wrapper is compared with: gradients are averaged after backward."""

    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def no_sync(self):
        return nullcontext()


def ours(*nets):
    """Nothing is left to be done after a backward."""


def naive(*nets):
    for net in nets:
        average_used(net)


def layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def draw(step, offset=0):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step + 10_000 * offset)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)


def adversaries(wrap, average):
    """A generator and a critic, which gets gradients in the generator's backward, too."""
    g, d = wrap(layers(1)), wrap(layers(2))
    of_g, of_d = sgd(g), sgd(d)
    for step in range(6):
        d.zero_grad()
        fake = g(draw(step))
        (d(draw(step, 1)).square().mean() - d(fake.detach()).mean()).backward()
        average(d)
        of_d.step()
        g.zero_grad()
        d.zero_grad()
        d(fake).mean().backward()
        average(g, d)
        of_g.step()
    return g, d


def losses_in_a_list(wrap, average):
    """Every loss is kept with its graph."""
    net, kept = wrap(layers()), []
    optimizer = sgd(net)
    for step in range(6):
        kept.append(net(draw(step)).square().mean())
        optimizer.zero_grad()
        kept[-1].backward()
        average(net)
        optimizer.step()
    return (net,)


def samples_of_one_rank(wrap, average):
    """Rank 0 looks at a sample now and then, with gradients enabled, and keeps it for a while."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(8):
        if step % 3 == 1 and dist.get_rank() == 0:
            sample = net(draw(step, 1))
        optimizer.zero_grad()
        loss = net(draw(step)).square().mean()
        loss.backward()
        average(net)
        optimizer.step()
        del loss
    assert dist.get_rank() or sample.requires_grad
    return (net,)


def hardest_of_a_list(wrap, average):
    """Each rank trains on the candidate whose loss is the largest."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(8):
        losses = [net(draw(step, i)).square().mean() for i in range(4)]
        optimizer.zero_grad()
        max(losses).backward()
        average(net)
        optimizer.step()
    return (net,)


def hardest_so_far(wrap, average):
    """As before, of which only the best one is kept."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(8):
        worst = None
        for i in range(4):
            loss = net(draw(step, i)).square().mean()
            if worst is None or loss > worst:
                worst = loss
        optimizer.zero_grad()
        worst.backward()
        average(net)
        optimizer.step()
    return (net,)


def uneven_evaluation(wrap, average):
    """Ranks evaluate on different numbers of batches, in eval mode, with gradients enabled."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(8):
        net.train()
        loss = net(draw(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average(net)
        optimizer.step()
        net.eval()
        total = 0.0
        for i in range(2 * dist.get_rank()):
            loss = net(draw(step, i)).square().mean()
            total += loss.item()
    return (net,)


def sharpness_aware(wrap, average):
    """SAM: each rank climbs by its own gradient, then takes the mean of those found there."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(6):
        with net.no_sync():
            net(draw(step)).square().mean().backward()
        with torch.no_grad():
            before = [p.clone() for p in net.parameters()]
            for p in net.parameters():
                p.add_(p.grad, alpha=0.1)
        net.zero_grad()
        net(draw(step)).square().mean().backward()
        average(net)
        with torch.no_grad():
            for p, old in zip(net.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()
        net.zero_grad()
    return (net,)


def averaged_copies(wrap, average):
    """An exponential average of the weights: a copy of the wrapper, evaluated on rank 0."""
    net = wrap(layers())
    optimizer, smooth = sgd(net), copy.deepcopy(net)
    for step in range(6):
        optimizer.zero_grad()
        net(draw(step)).square().mean().backward()
        average(net)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(smooth.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.2)
            if dist.get_rank() == 0:
                smooth(draw(step))
    return net, smooth


def accumulated(wrap, average):
    """Micro batches under no_sync, of which ranks have different numbers."""
    net = wrap(layers())
    optimizer = sgd(net)
    for step in range(6):
        optimizer.zero_grad()
        with net.no_sync():
            for i in range(dist.get_rank() + 1):
                loss = net(draw(step, i)).square().mean()
                if i != 1:
                    loss.backward()
        net(draw(step)).square().mean().backward()
        average(net)
        optimizer.step()
    return (net,)


PROGRAMS = [
    adversaries,
    losses_in_a_list,
    samples_of_one_rank,
    hardest_of_a_list,
    hardest_so_far,
    uneven_evaluation,
    sharpness_aware,
    averaged_copies,
    accumulated,
]


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("hook", [None, "fp16"])
@pytest.mark.narrow({"hook": None})
@on_ranks(2)
def test_gradients_equal_an_average_after_each_backward(program, hook):
    def wrap(module):
        net = DistributedDataParallel(module, check_replicas=1)
        if hook:
            net.register_comm_hook(None, hook)
        return net

    trained, twins = program(wrap, ours), program(Naive, naive)
    for net, twin in zip(trained, twins, strict=True):
        for (n, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            tolerance = {"rtol": 1e-2, "atol": 1e-2} if hook else {}
            torch.testing.assert_close(p, q, msg=n, **tolerance)
