"""Gradients lie in memory of their own, or in their bucket with gradient_as_bucket_view."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import assert_average, average_used, mlp, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import NotSupportedError, ReductionError

pytestmark = pytest.mark.usefixtures("each_backend")


class Halves(nn.Module):
    """Two layers that are used one without the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *names):
        return [getattr(self, name)(x) for name in names or ("first", "second")]


def batch():
    return torch.full((2, 4), 1.0 + dist.get_rank())


def absent(net):
    return [name for name, p in net.named_parameters() if p.grad is None]


@pytest.mark.parametrize("size", [3, 20_000, 1_200_000])
@on_ranks(2)
def test_gradients_cannot_be_told_from_those_without_a_wrapper(size):
    """Odd sizes would lie at odd places in a bucket."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.w = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(size, 2))

        def forward(self, x):
            return self.odd.sum() * x + (self.w * x).sum()

    net, kept = DistributedDataParallel(Net()), []
    for step in range(3):
        net.zero_grad()
        net(torch.tensor(1.0 + dist.get_rank() + step)).backward()
        for gradient in (p.grad for p in net.parameters()):
            file = io.BytesIO()
            torch.save(gradient, file)
            assert gradient.storage_offset() == 0
            assert gradient.untyped_storage().nbytes() == gradient.nbytes
            assert len(file.getvalue()) < gradient.nbytes + 2_000
            kept.append((gradient.untyped_storage(), gradient.clone()))
        torch.view_as_complex(net.module.w.grad)
        net.module.w.grad.view(torch.int64)
    for storage, was in kept:
        assert torch.equal(torch.tensor([]).set_(storage), was.flatten())


def test_two_backwards_for_one_reduction(same_as_one_process):
    def program(net, rank, step):
        first, second = net(torch.full((2, 4), 1.0 + rank))
        first.square().sum().backward()
        assert absent(net.module) == ["second.weight", "second.bias"]
        second.square().sum().backward()

    same_as_one_process(program, model=Halves)


@on_ranks(2)
def test_gradients_of_another_dtype():
    half = mlp().bfloat16()
    net = DistributedDataParallel(half)
    half[2].weight.grad_dtype = torch.float32
    with pytest.raises(NotSupportedError, match=r"has dtype torch\.float32 and the parameter"):
        net(batch().bfloat16()).sum().backward()
    with pytest.raises(NotSupportedError, match=r"2\.weight is of torch\.bfloat16"):
        DistributedDataParallel(half)


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_gradient_that_a_hook_keeps_and_replaces(view, clear):
    """The one that was replaced is the hook's, and so is all that shares its memory."""
    net, twin = DistributedDataParallel(mlp(), gradient_as_bucket_view=view), mlp()
    kept = []
    for module in (net, twin):
        module(batch()).square().sum().backward()
    average_used(twin)

    def keep(p):
        kept.append((p.grad if p.ndim == 1 else p.grad.detach(), p.grad.clone()))
        p.grad = p.grad * 2

    def double(p):
        p.grad = p.grad * 2

    for p, q in zip(net.module[2:].parameters(), twin[2:].parameters(), strict=True):
        p.register_post_accumulate_grad_hook(keep)
        q.register_post_accumulate_grad_hook(double)
    for step in range(3):
        for module in (net, twin):
            if clear:
                module.zero_grad()
            module(batch() + step).square().sum().backward()
        assert_average(net, twin)
    if clear or not view:  # else they are views of a buffer that is used again
        assert all(torch.equal(a, b) for a, b in kept)


@pytest.mark.parametrize("cap", [None, 1e-6])
@on_ranks(2)
def test_gradients_that_are_cleared_between_backwards(cap):
    """They are missed, whether their bucket waits or is in flight."""
    net = DistributedDataParallel(Halves(), bucket_cap_mb=cap)
    first, second = net(batch())
    first.sum().backward()
    net.zero_grad()
    with pytest.raises(ReductionError, match="was set to None before"):
        second.sum().backward()
    assert absent(net.module)[:2] == ["first.weight", "first.bias"]
