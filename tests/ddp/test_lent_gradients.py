"""Small gradients accumulate directly in their bucket, without visible zeros."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import Trap, assert_average, average_used, mlp, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.buckets.packed import LentGradients
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.testing import run_ranks

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


def test_gradients_are_lent_from_the_first_step():
    def main():
        net = DistributedDataParallel(mlp())
        places = set()
        for _ in range(3):
            net.zero_grad()
            net(batch()).sum().backward()
            places |= {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
        return len(places)

    assert max(run_ranks(main, 2)) <= 2  # buckets are assigned anew after the first backward


@on_ranks(2)
def test_a_failed_backward_leaves_no_lent_gradient():
    net = DistributedDataParallel(mlp())
    net.zero_grad()
    hidden = net.module[0]
    handle = hidden.register_forward_hook(lambda m, i, o: Trap.apply(o))
    with pytest.raises(ArithmeticError):
        net(batch()).sum().backward()
    missing = absent(net.module)
    handle.remove()
    net.zero_grad()
    net(batch()).sum().backward()
    assert (missing, absent(net)) == (["0.weight", "0.bias"], [])


@on_ranks(2)
def test_a_backward_for_some_inputs_leaves_no_lent_gradient():
    net = DistributedDataParallel(Halves())
    first = list(net.module.first.parameters())
    sum(net(batch())).sum().backward(inputs=first)
    missing = absent(net.module)
    with pytest.raises(Exception, match="got no gradient"):
        net(batch())
    left = ["second.weight", "second.bias"]
    assert (missing, absent(net.module)) == (left, left)


def test_two_backwards_for_one_reduction(same_as_one_process):
    def program(net, rank, step):
        first, second = net(torch.full((2, 4), 1.0 + rank))
        first.square().sum().backward()
        assert absent(net.module) == ["second.weight", "second.bias"]
        second.square().sum().backward()

    same_as_one_process(program, model=Halves)


@pytest.mark.parametrize("rank_1", ["first", "second"])
def test_a_gradient_unused_on_all_ranks_stays_none(rank_1, same_as_one_process):
    def program(net, rank, step):
        net(torch.full((2, 4), 1.0 + rank), rank_1 if rank else "first")[0].sum().backward()

    def check(net):
        assert len(absent(net)) == (2 if rank_1 == "first" else 0)

    options = {"find_unused_parameters": True}
    same_as_one_process(program, options=options, model=Halves, check=check)


class Pair(nn.Module):
    """Two parameters, and what is computed of them."""

    def __init__(self, compute):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.compute = compute

    def forward(self, x):
        return self.compute(self.b * x, self.w)


class Undefined(torch.autograd.Function):
    """Has no gradient for its second input."""

    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@on_ranks(2)
def test_undefined_gradients():
    compute = Undefined.apply if dist.get_rank() else torch.mul
    net = DistributedDataParallel(Pair(compute), find_unused_parameters=True)
    for _ in range(2):
        net.zero_grad()
        net(torch.ones(3)).sum().backward()
    assert (net.module.w.grad.tolist(), net.module.b.grad.tolist()) == ([0.5] * 3, [1.0] * 3)


@on_ranks(2)
def test_a_graph_that_keeps_a_gradient():
    """The tensor has no other name by then: autograd alone holds it."""
    net = DistributedDataParallel(mlp())
    net(batch()).square().sum().backward()
    weight = torch.ones(8, requires_grad=True)
    product = (weight * net.module[0].bias.grad).sum()
    want = net.module[0].bias.grad.clone()
    net.module[2].bias.grad.mul_(2)  # its neighbour in the buffer: nothing of the graph's
    net.zero_grad()
    net(batch() + 1).square().sum().backward()
    product.backward()
    assert torch.equal(weight.grad, want)


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
    """The one that was lent, or lay there before, is the hook's, and so is all that shares it."""
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
    assert all(torch.equal(a, b) for a, b in kept)


@on_ranks(2)
def test_a_gradient_that_is_replaced_between_backwards():
    net, twin = DistributedDataParallel(Halves()), Halves()
    kept = []
    for module in (net, twin):
        first, second = module(batch())
        first.square().sum().backward()
        for p in (module if module is twin else net.module).first.parameters():
            kept.append((p.grad, p.grad.clone()))
            p.grad = p.grad * 2
        second.square().sum().backward()
    assert_average(net, twin)
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


@on_ranks(2)
def test_parameters_without_elements():
    """Where they lie says nothing about who else uses the buffer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.w = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.w * x + self.none.sum()

    net = DistributedDataParallel(Net())
    for _ in range(2):
        net.module.w.grad = None  # and not that of the other one
        net(torch.ones(3)).sum().backward()
    kept = net.module.w.grad
    net.module.w.grad = None
    net(2 * torch.ones(3)).sum().backward()
    assert kept.tolist() == [1.0] * 3


class WritesItself(torch.autograd.Function):
    """Puts a gradient where it belongs, by a way that counts no versions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.w.grad is None:
            ctx.w.grad = torch.zeros_like(ctx.w)
        ctx.w.grad.data.add_(grad)
        return grad, None


@on_ranks(2)
def test_an_autograd_function_that_writes_to_grad():
    net = DistributedDataParallel(Pair(WritesItself.apply), find_unused_parameters=True)
    net(torch.ones(3)).sum().backward()
    assert net.module.w.grad.tolist() == [1.0] * 3


@on_ranks(2)
def test_zeros_that_a_hook_scales():
    """A hook runs for a gradient that is undefined, too: it finds zeros."""

    def scale(p):
        if p.grad is not None:
            p.grad.mul_(2)

    net = DistributedDataParallel(Pair(Undefined.apply), find_unused_parameters=True)
    net.module.w.register_post_accumulate_grad_hook(scale)
    net(torch.ones(3)).sum().backward()
    assert absent(net.module) == ["w"]


def test_an_interrupt_while_gradients_are_lent():
    """As a signal's handler raises it."""

    class Parameters(list):
        def __getitem__(self, place):
            if place == 1 and self[0].grad is not None and interrupts.pop():
                raise KeyboardInterrupt
            return super().__getitem__(place)

    parameters, interrupts = Parameters(nn.Parameter(torch.ones(2)) for _ in range(2)), [0, 1]
    lent = LentGradients(parameters, range(2))
    lent.set_views(torch.empty(4).split(2))
    with pytest.raises(KeyboardInterrupt):
        lent.lend((), None)
    lent.take_back()
    assert [p.grad for p in parameters] == [None, None]
