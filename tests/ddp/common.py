"""The oracle of the tests: gradients are those of one process that runs all ranks' parts.

Also models that fail in backward, and the reference for parameters that are not used.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp import naive
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import PeerFailedError
from gradwire.testing import run_ranks


def on_ranks(ranks, **options):
    """Run a test on each of so many ranks, with the options of `run_ranks`."""

    def decorate(test):
        @wraps(test)
        def run(*args, **kwargs):
            # that of the module runs them on the backend of the fixture
            own = getattr(sys.modules[test.__module__], "run_ranks", run_ranks)
            own(partial(test, *args, **kwargs), ranks, **options)

        return run

    return decorate


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Trap(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("trap")


def sprung(where, rank=1):
    """An mlp; on one rank its backward raises at a layer: 0 after all gradients, 5 before any."""

    class Sprung(nn.Sequential):
        on = False

        def forward(self, x):
            for i, layer in enumerate((*self, nn.Identity())):
                if i == where and self.on and dist.get_rank() == rank:
                    x = Trap.apply(x.requires_grad_() if i == 0 else x)
                x = layer(x)
            return x

    return Sprung(*mlp())


def inputs(rank):
    return torch.full((2, 4), rank + 1.0)


def step(*nets, loss=lambda outputs: sum(y.square().mean() for y in outputs)):
    for net in nets:
        net.zero_grad()
    loss([net(inputs(dist.get_rank())) for net in nets]).backward()
    return [p.grad for p in nets[0].parameters()]


def assert_good_step(*nets):
    step(*nets)
    for net in nets:
        ranks = dist.get_process_group_ranks(net.process_group)

        def alone(plain, rank, _, ranks=ranks):
            plain(inputs(ranks[rank])).square().mean().backward()

        assert_gradients(net, in_one_process(alone, net.module, 0, len(ranks)))


def fail_on_rank_1(net, *others):
    """Raise in backward on rank 1, where it passes a net of `sprung`, and on the other ranks."""
    net.module.on = True
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else PeerFailedError):
        step(net, *others)
    net.module.on = False


def average_used(net):
    """What find_unused_parameters has to do: a mean over ranks of what any of them used."""
    for p in net.parameters():
        used = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(used)
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            naive.average_gradients(dist.group.WORLD, [p])


def assert_same(net, twin):
    for (n, p), q in zip(net.module.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=n)


def assert_average(net, twin):
    """Raise unless gradients are the mean over ranks of those of a twin, which get that value."""
    average_used(twin)
    assert_same(net, twin)


def assert_same_on_ranks(tensors):
    """Raise unless all ranks have the same bits."""
    own = torch.cat([t.detach().to_dense().flatten().to(torch.complex128) for t in tensors])
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own)
    assert all(torch.equal(own, other) for other in everyones)


class OneProcess(nn.Module):
    """A module as a program sees it that also runs under DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def no_sync(self):
        return nullcontext()

    def finalize_backward(self):
        """Nothing waits to be finalized."""


def in_one_process(program, module, step, ranks):
    """Return the mean over ranks of the gradients; None where no rank has one."""
    each = []
    for rank in range(ranks):
        alone = OneProcess(copy.deepcopy(module))
        alone.zero_grad()
        program(alone, rank, step)
        each.append([p.grad for p in alone.parameters()])
    means = []
    for grads in zip(*each, strict=True):
        own = [g.to_dense() for g in grads if g is not None]
        means.append(sum(own) / ranks if own else None)
    return means


def assert_gradients(net, expected, **tolerance):
    for (n, p), want in zip(net.module.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (want is None), n
        if want is not None:
            torch.testing.assert_close(p.grad.to_dense(), want, msg=n, **tolerance)


def same_as_one_process(
    program,
    ranks=2,
    options=None,
    hook=None,
    *,
    backend,
    model=mlp,
    steps=3,
    check=None,
    **tolerance,
):
    """Run `program(net, rank, step)` on all ranks; raise unless gradients are those of one process.

    Args:
        program: Function that runs forwards and backwards on a rank's own inputs.
        ranks: Number of ranks.
        options: Arguments of the wrapper, or a function that returns them for a module.
        hook: Communication hook.
        backend: Backend of the ranks.
        model: Function that makes the module.
        steps: Number of steps, each of which begins with `zero_grad()`.
        check: Function of the wrapped module that is called after each step.
        **tolerance: Arguments of `torch.testing.assert_close`.
    """

    def main():
        module = model()
        given = options(module) if callable(options) else options or {}
        net = DistributedDataParallel(module, **given)
        net.register_comm_hook(None, hook)
        for step in range(steps):
            expected = in_one_process(program, net.module, step, ranks)
            net.zero_grad()
            program(net, dist.get_rank(), step)
            assert_gradients(net, expected, **tolerance)
            if check is not None:
                check(net)

    run_ranks(main, ranks, backend=backend, timeout=100)
