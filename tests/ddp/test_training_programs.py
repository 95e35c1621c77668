"""Programs that PyTorch's class trains correctly: no check may stop them or change a gradient."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import OneProcess, average_used, on_ranks
from gradwire.ddp import DistributedDataParallel


class Naive(OneProcess):
    """What the wrapper is compared with: gradients are averaged after backward."""

    def __init__(self, module, **_):
        super().__init__(module)


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


def loss_of(net, step, offset=0):
    return net(draw(step, offset)).square().mean()


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


def averaged_copies(wrap, average):
    """An exponential average of the weights: a copy of the wrapper, evaluated on rank 0."""
    net = wrap(layers())
    optimizer, smooth = sgd(net), copy.deepcopy(net)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        average(net)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(smooth.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.2)
            if dist.get_rank() == 0:
                smooth(draw(step))
    return net, smooth


# -- losses of one network, some of which ranks compute more often than others ------------------


def losses_in_a_list(net, step, kept):
    """Every loss is kept with its graph."""
    kept.append(loss_of(net, step))
    return kept[-1]


def samples_of_one_rank(net, step, kept):
    """Rank 0 looks at a sample now and then, with gradients enabled, and keeps it for a while."""
    if step % 3 == 1 and dist.get_rank() == 0:
        kept[:] = [net(draw(step, 1))]
    return loss_of(net, step)


def hardest_so_far(net, step, kept):
    """Each rank trains on the candidate whose loss is the largest, and keeps only that one."""
    worst = None
    for i in range(4):
        loss = loss_of(net, step, i)
        if worst is None or loss > worst:
            worst = loss
    return worst


def uneven_evaluation(net, step, kept):
    """Ranks evaluate on different numbers of batches, in eval mode, with gradients enabled."""
    net.eval()
    for i in range(2 * dist.get_rank()):
        loss_of(net, step, i).item()
    net.train()
    return loss_of(net, step)


def sharpness_aware(net, step, kept):
    """SAM: each rank climbs by its own gradient, then takes the mean of those found there."""
    with net.no_sync():
        loss_of(net, step).backward()
    with torch.no_grad():
        before = [p.clone() for p in net.parameters()]
        for p in net.parameters():
            p.add_(p.grad, alpha=0.1)
    net.zero_grad()
    kept[:] = before
    return loss_of(net, step)


def accumulated(net, step, kept):
    """Micro batches under no_sync, of which ranks have different numbers."""
    with net.no_sync():
        for i in range(dist.get_rank() + 1):
            loss = loss_of(net, step, i)
            if i != 1:
                loss.backward()
    return loss_of(net, step)


def trained(loss, wrap, average):
    net, kept = wrap(layers()), []
    optimizer = sgd(net)
    for step in range(8):
        optimizer.zero_grad()
        loss(net, step, kept).backward()
        average(net)
        if loss is sharpness_aware:  # steps from where it was before it climbed
            with torch.no_grad():
                for p, old in zip(net.parameters(), kept, strict=True):
                    p.copy_(old)
        optimizer.step()
    return (net,)


LOSSES = [
    losses_in_a_list,
    samples_of_one_rank,
    hardest_so_far,
    uneven_evaluation,
    sharpness_aware,
    accumulated,
]
PROGRAMS = {
    "adversaries": adversaries,
    "averaged copies": averaged_copies,
    **{loss.__name__: partial(trained, loss) for loss in LOSSES},
}


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("hook", [None, "fp16"])
@pytest.mark.narrow({"hook": None})
@on_ranks(2)
def test_gradients_equal_an_average_after_each_backward(program, hook):
    def wrap(module):
        net = DistributedDataParallel(module, check_replicas=1)
        net.register_comm_hook(None, hook)
        return net

    run = PROGRAMS[program]
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if hook else {}
    for net, twin in zip(run(wrap, ours), run(Naive, naive), strict=True):
        for (n, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, msg=n, **tolerance)
