"""Small gradients accumulate directly in their bucket, without visible zeros."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import Trap, assert_same, average_used, mlp
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


def test_a_failed_backward_leaves_no_lent_gradient():
    def main():
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
        return missing, absent(net)

    assert run_ranks(main, 2) == [(["0.weight", "0.bias"], [])] * 2


def test_a_backward_for_some_inputs_leaves_no_lent_gradient():
    def main():
        net = DistributedDataParallel(Halves())
        first = list(net.module.first.parameters())
        sum(net(batch())).sum().backward(inputs=first)
        missing = absent(net.module)
        with pytest.raises(Exception, match="got no gradient"):
            net(batch())
        return missing, absent(net.module)

    left = ["second.weight", "second.bias"]
    assert run_ranks(main, 2) == [(left, left)] * 2


def test_two_backwards_for_one_reduction():
    def main():
        net, twin = DistributedDataParallel(Halves()), Halves()
        for _ in range(3):
            net.zero_grad()
            twin.zero_grad()
            first, second = net(batch())
            first.square().sum().backward()
            assert absent(net.module) == ["second.weight", "second.bias"]
            second.square().sum().backward()
            for out in twin(batch()):
                out.square().sum().backward()
            average_used(twin)
            assert_same(net, twin)

    run_ranks(main, 2)


@pytest.mark.parametrize("rank_1", ["first", "second"])
def test_a_gradient_unused_on_all_ranks_stays_none(rank_1):
    def main():
        net, twin = DistributedDataParallel(Halves(), find_unused_parameters=True), Halves()
        name = "first" if dist.get_rank() == 0 else rank_1
        for _ in range(3):
            net.zero_grad()
            twin.zero_grad()
            net(batch(), name)[0].square().sum().backward()
            twin(batch(), name)[0].square().sum().backward()
            average_used(twin)
            assert_same(net, twin)
        return len(absent(net))

    assert run_ranks(main, 2) == [2 if rank_1 == "first" else 0] * 2


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


def test_undefined_gradients():
    def main():
        compute = Undefined.apply if dist.get_rank() else torch.mul
        net = DistributedDataParallel(Pair(compute), find_unused_parameters=True)
        for _ in range(2):
            net.zero_grad()
            net(torch.ones(3)).sum().backward()
        return net.module.w.grad.tolist(), net.module.b.grad.tolist()

    assert run_ranks(main, 2) == [([0.5] * 3, [1.0] * 3)] * 2


def test_gradients_kept_by_the_user():
    """Results of the next backward go elsewhere."""

    def main():
        net = DistributedDataParallel(mlp())
        kept = []
        for step in range(4):
            net.zero_grad()
            net(batch() + step).square().sum().backward()
            kept.append([(p.grad, p.grad.clone()) for p in net.parameters()])
        return all(torch.equal(a, b) for pairs in kept for a, b in pairs)

    assert run_ranks(main, 2) == [True, True]


def test_a_graph_that_keeps_a_gradient():
    """The tensor has no other name by then: autograd alone holds it."""

    def main():
        net = DistributedDataParallel(mlp())
        net(batch()).square().sum().backward()
        weight = torch.ones(8, requires_grad=True)
        product = (weight * net.module[0].bias.grad).sum()
        want = net.module[0].bias.grad.clone()
        net.module[2].bias.grad.mul_(2)  # its neighbour in the buffer: nothing of the graph's
        net.zero_grad()
        net(batch() + 1).square().sum().backward()
        product.backward()
        return torch.equal(weight.grad, want)

    assert run_ranks(main, 2) == [True, True]


def test_hooks_that_replace_gradients():
    """What a hook of the user's puts into .grad counts, and gets the result."""

    def main():
        net, twin = DistributedDataParallel(mlp()), mlp()

        def double(p):
            p.grad = p.grad * 2

        for module in (net.module, twin):
            for p in (module[0].bias, module[2].weight):
                p.register_post_accumulate_grad_hook(double)
        for step in range(3):
            for module in (net, twin):
                module.zero_grad()
                module(batch() + step).square().sum().backward()
            average_used(twin)
            assert_same(net, twin)

    run_ranks(main, 2)


def test_gradients_of_another_dtype():
    def main():
        half = mlp().bfloat16()
        net = DistributedDataParallel(half)
        half[2].weight.grad_dtype = torch.float32
        with pytest.raises(NotSupportedError, match=r"has dtype torch\.float32 and the parameter"):
            net(batch().bfloat16()).sum().backward()
        with pytest.raises(NotSupportedError, match=r"2\.weight is of torch\.bfloat16"):
            DistributedDataParallel(half)

    run_ranks(main, 2)


def test_frozen_parameters_have_no_gradient():
    def main():
        net = DistributedDataParallel(mlp())
        net.module[0].requires_grad_(False)
        for _ in range(2):
            net.zero_grad()
            net(batch()).sum().backward()
        return absent(net.module)

    assert run_ranks(main, 2) == [["0.weight", "0.bias"]] * 2


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_that_a_hook_keeps_and_replaces(view, clear):
    """The one that was lent, or lay there before, is the hook's, and so is all that shares it."""

    def main():
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
            average_used(twin)
            assert_same(net, twin)
        return all(torch.equal(a, b) for a, b in kept)

    assert run_ranks(main, 2) == [True, True]


def test_a_gradient_that_is_replaced_between_backwards():
    def main():
        net, twin = DistributedDataParallel(Halves()), Halves()
        kept = []
        for module in (net, twin):
            first, second = module(batch())
            first.square().sum().backward()
            for p in (module if module is twin else net.module).first.parameters():
                kept.append((p.grad, p.grad.clone()))
                p.grad = p.grad * 2
            second.square().sum().backward()
        average_used(twin)
        assert_same(net, twin)
        return all(torch.equal(a, b) for a, b in kept)

    assert run_ranks(main, 2) == [True, True]


@pytest.mark.parametrize("cap", [None, 1e-6])
def test_gradients_that_are_cleared_between_backwards(cap):
    """They are missed, whether their bucket waits or is in flight."""

    def main():
        net = DistributedDataParallel(Halves(), bucket_cap_mb=cap)
        first, second = net(batch())
        first.sum().backward()
        net.zero_grad()
        with pytest.raises(ReductionError, match="was set to None before"):
            second.sum().backward()
        return absent(net.module)[:2]

    assert run_ranks(main, 2) == [["first.weight", "first.bias"]] * 2


def test_parameters_without_elements():
    """Where they lie says nothing about who else uses the buffer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.w = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.w * x + self.none.sum()

    def main():
        net = DistributedDataParallel(Net())
        for _ in range(2):
            net.module.w.grad = None  # and not that of the other one
            net(torch.ones(3)).sum().backward()
        kept = net.module.w.grad
        net.module.w.grad = None
        net(2 * torch.ones(3)).sum().backward()
        return kept.tolist()

    assert run_ranks(main, 2) == [[1.0] * 3] * 2


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


def test_an_autograd_function_that_writes_to_grad():
    def main():
        net = DistributedDataParallel(Pair(WritesItself.apply), find_unused_parameters=True)
        net(torch.ones(3)).sum().backward()
        return net.module.w.grad.tolist()

    assert run_ranks(main, 2) == [[1.0] * 3] * 2


def test_zeros_that_a_hook_scales():
    """A hook runs for a gradient that is undefined, too: it finds zeros."""

    def scale(p):
        if p.grad is not None:
            p.grad.mul_(2)

    def main():
        net = DistributedDataParallel(Pair(Undefined.apply), find_unused_parameters=True)
        net.module.w.register_post_accumulate_grad_hook(scale)
        net(torch.ones(3)).sum().backward()
        return absent(net.module)

    assert run_ranks(main, 2) == [["w"]] * 2


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
