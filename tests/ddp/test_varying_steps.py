"""Steps that differ from earlier ones: their gradients are averaged, or an error says why not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import Trap, average_used
from gradwire.ddp import DistributedDataParallel, Reducer
from gradwire.errors import DistributedError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Net(nn.Module):
    """Four layers, and what they give before the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.features = None

    def forward(self, x, use=range(4), run=lambda layer, x: layer(x)):
        for i in use:
            self.features = x
            x = run(self.layers[i], x).tanh()
        return x


def squares(net, x):
    return net(x).square().sum()


class Twins:
    """A network under a wrapper and one without: three steps have been taken."""

    def __init__(self, loss=squares, **options):
        self.twin = Net()
        self.net = DistributedDataParallel(Net(), **options)
        for step in range(3):
            self.clear()
            self.check(step, loss)

    def clear(self):
        self.net.zero_grad()
        self.twin.zero_grad()

    def check(self, step=3, loss=squares):
        """A step of both, with the same gradients."""
        x = torch.full((2, 4), 1.0 + dist.get_rank() + step)
        loss(self.net, x).backward()
        loss(self.twin, x).backward()
        average_used(self.twin)
        self.check_gradients()

    def check_gradients(self):
        for p, q in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def in_turn(main):
    assert run_ranks(main, 2) == [None] * 2


def test_gradients_accumulate_without_zero_grad():
    def main():
        twins = Twins()
        for step in range(3):
            # what has been averaged is added to, and averaged again
            twins.check(step)

    in_turn(main)


def test_zero_grad_of_some_parameters():
    def main():
        twins = Twins()
        for net in (twins.net.module, twins.twin):
            net.layers[1].zero_grad()
            net.layers[3].weight.grad = None
        twins.check()

    in_turn(main)


def test_no_sync_between_steps():
    def main():
        twins = Twins()
        twins.clear()
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        with twins.net.no_sync():
            twins.net(x).sum().backward()
        twins.twin(x).sum().backward()
        twins.check()

    in_turn(main)


def test_a_local_backward_before_a_forward():
    """Of some parameters: it stays local, and is averaged with the next."""

    def main():
        twins = Twins()
        twins.clear()
        for net in (twins.net.module, twins.twin):
            (net.layers[0].weight.square().sum() * (1 + dist.get_rank())).backward()
        twins.check()

    in_turn(main)


class Both(torch.autograd.Function):
    """Gives both of its inputs a gradient in one memory."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        return grad.view(4, 4), grad.view(4, 4)


def in_one_memory(net):
    a, b = (getattr(net, "module", net).layers[i].weight for i in (1, 2))
    out = Both.apply(a, b) * torch.arange(16.0).view(4, 4) * (1 + dist.get_rank())
    out.sum().backward()
    if isinstance(net, Net):  # which no wrapper looks after
        assert a.grad.data_ptr() == b.grad.data_ptr()
        b.grad = b.grad.clone()


def test_two_gradients_in_the_same_memory():
    """A backward outside of the wrapper may leave them so: the next adds to both."""

    def main():
        twins = Twins()
        twins.clear()
        in_one_memory(twins.net)
        in_one_memory(twins.twin)
        twins.check()

    in_turn(main)


def test_two_gradients_in_the_same_memory_within_no_sync():
    def main():
        twins = Twins()
        twins.clear()
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        with twins.net.no_sync():
            for net in (twins.net, twins.twin):
                out = net(x).square().sum()
                in_one_memory(net)
                out.backward()
        twins.check()

    in_turn(main)


def test_an_unused_parameter_is_named():
    def main():
        twins = Twins()
        twins.clear()
        x = torch.ones(2, 4)
        twins.net(x, use=[0, 2, 3]).sum().backward()
        absent = [n for n, p in twins.net.module.named_parameters() if p.grad is None]
        assert absent == ["layers.1.weight", "layers.1.bias"]
        with pytest.raises(Exception, match=r"layers\.1\.weight") as raised:
            twins.net(x)
        return type(raised.value).__name__

    assert "ReductionError" in run_ranks(main, 2)


class Nothing(torch.autograd.Function):
    """Gives its second input no gradient, on rank 1."""

    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum()

    @staticmethod
    def backward(ctx, grad):
        there = dist.get_rank() == 0
        return grad, grad.sum().expand(4, 4).contiguous() if there else None


def test_a_parameter_without_a_gradient_on_one_rank():
    def main():
        twins = Twins()
        twins.clear()

        def loss(net, x):
            inner = getattr(net, "module", net)
            return Nothing.apply(net(x, use=[0, 2, 3]), inner.layers[1].weight).sum()

        def with_bias(net, x):
            return loss(net, x) + getattr(net, "module", net).layers[1].bias.sum()

        twins.check(loss=with_bias)

    in_turn(main)


def test_a_parameter_that_the_loss_uses_directly():
    def main():
        twins = Twins()
        for step in range(3):
            twins.clear()

            def loss(net, x):
                inner = getattr(net, "module", net)
                # of the last layer only in the loss, where its gradients come first
                out = net(x, use=[0, 1, 2])
                return out.sum() * inner.layers[3].weight.sum() * inner.layers[3].bias.sum()

            twins.check(step, loss)

    in_turn(main)


def test_a_backward_that_bypasses_the_outputs():
    def main():
        twins = Twins()
        for step in range(2):
            twins.clear()

            def loss(net, x):
                net(x, use=[3, 2, 1, 0, 0])  # no output of it takes part
                return getattr(net, "module", net).features.square().sum()

            twins.check(step, loss)

    in_turn(main)


def test_autograd_grad_leaves_gradients_alone():
    def main():
        twins = Twins()
        twins.clear()
        x = torch.ones(2, 4, requires_grad=True)
        out = twins.net(x).sum()
        weight = twins.net.module.layers[0].weight
        torch.autograd.grad(out, [x, weight], retain_graph=True)
        assert all(p.grad is None for p in twins.net.parameters())
        out.backward()
        twins.twin(x).sum().backward()
        average_used(twins.twin)
        twins.check_gradients()
        twins.clear()
        twins.check()

    in_turn(main)


def test_a_repeated_backward():
    def main():
        twins = Twins()
        twins.clear()

        def loss(net, x):
            out = net(x).square().sum()
            out.backward(retain_graph=True)
            net.zero_grad()
            return out

        twins.check(loss=loss)

    in_turn(main)


def test_create_graph_in_a_later_step():
    def main():
        twins = Twins()
        twins.clear()
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        twins.net(x).square().sum().backward(create_graph=True)
        twins.twin(x).square().sum().backward()
        average_used(twins.twin)
        twins.check_gradients()
        twins.clear()
        twins.check()

    in_turn(main)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("after_outputs", [True, False])
def test_checkpoints(use_reentrant, after_outputs):
    def loss(net, x):
        inner = getattr(net, "module", net)
        x.requires_grad_()
        if after_outputs:
            out = net(x, use=[0, 2, 3])
            return checkpoint(inner.layers[1], out, use_reentrant=use_reentrant).square().sum()
        return net(x, run=lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)).sum()

    def main():
        twins = Twins(loss=loss)
        for step in range(2):
            twins.clear()
            twins.check(step, loss)

    in_turn(main)


def test_a_user_hook_registered_between_steps():
    def main():
        twins = Twins()
        found = []
        for net in (twins.net.module, twins.twin):
            weight = net.layers[1].weight
            weight.register_hook(lambda g, w=weight: found.append(w.grad) or 2 * g)
            bias = net.layers[2].bias
            bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 3 * p.grad))
        for step in range(2):
            twins.clear()
            twins.check(step)
        assert found == [None] * 4

    in_turn(main)


def test_a_step_after_a_failed_backward():
    def main():
        twins = Twins()
        twins.clear()
        hidden = twins.net.module.layers[1]
        handle = hidden.register_forward_hook(lambda m, i, o: Trap.apply(o))
        with pytest.raises(ArithmeticError):
            twins.net(torch.ones(2, 4)).sum().backward()
        handle.remove()
        for step in range(2):
            twins.clear()
            twins.check(step)

    in_turn(main)


def test_parameters_frozen_and_unfrozen_between_steps():
    def main():
        twins = Twins()
        for frozen in (True, False):
            for net in (twins.net.module, twins.twin):
                net.layers[1].requires_grad_(not frozen)
            twins.clear()
            x = torch.full((2, 4), 1.0 + dist.get_rank())
            for net in (twins.net, twins.twin):
                net(x).square().sum().backward()
            average_used(twins.twin)
            for p, q in zip(twins.net.parameters(), twins.twin.parameters(), strict=True):
                if p.requires_grad:
                    torch.testing.assert_close(p.grad, q.grad)

    in_turn(main)


def test_kept_gradients_do_not_change():
    def main():
        twins = Twins()
        for keep in (lambda g: g, lambda g: g.detach(), lambda g: g.numpy(), lambda g: g[0]):
            twins.clear()
            twins.check()
            kept = [keep(p.grad) for p in twins.net.parameters()]
            values = [torch.as_tensor(k).clone() for k in kept]
            twins.clear()
            twins.check(step=7)
            for k, v in zip(kept, values, strict=True):
                assert torch.equal(torch.as_tensor(k), v)

    in_turn(main)


def apart(net, x):
    """Two parts of the module, the second of which does not reach the first."""
    out = net(x, use=[0, 1])
    module = getattr(net, "module", net)
    head = module.layers[3](module.layers[2](out.detach()).tanh())
    return out.square().sum(), head.square().sum()


@pytest.mark.parametrize("head_first", [True, False])
def test_a_separate_backward_for_each_part(head_first):
    def main():
        twins = Twins()
        for step in range(2):
            twins.clear()
            x = torch.full((2, 4), 1.0 + dist.get_rank() + step)
            for net in (twins.net, twins.twin):
                for loss in apart(net, x)[:: -1 if head_first else 1]:
                    loss.backward()
            average_used(twins.twin)
            twins.check_gradients()

    in_turn(main)


def test_a_frozen_first_layer_and_unused_outputs():
    def main():
        twins = Twins()
        for net in (twins.net.module, twins.twin):
            net.layers[0].requires_grad_(False)
        if dist.get_rank() == 0:
            twins.net.zero_grad(set_to_none=False)
            twins.twin.zero_grad(set_to_none=False)
        for step in range(2):
            twins.clear()

            def loss(net, x):
                net(x, use=[0, 3, 2, 1, 1])
                return getattr(net, "module", net).features.square().sum()

            x = torch.full((2, 4), 1.0 + dist.get_rank() + step)
            loss(twins.net, x).backward()
            loss(twins.twin, x).backward()
            average_used(twins.twin)
            twins.check_gradients()

    in_turn(main)


class Trunk(nn.Module):
    """A large layer with two small ones on it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(128, 128)
        self.heads = nn.ModuleList(nn.Linear(128, 2) for _ in range(2))

    def forward(self, x):
        x = self.trunk(x)
        return [head(x).sum() for head in self.heads]


def test_a_large_gradient_that_arrives_twice_is_an_error():
    def main():
        net = DistributedDataParallel(Trunk())
        x = torch.ones(2, 128)
        for _ in range(3):
            net.zero_grad()
            sum(net(x)).backward()
        net.zero_grad()
        first, second = net(x)
        first.backward(retain_graph=True)
        with pytest.raises(DistributedError, match=r"trunk\.(weight|bias).* twice"):
            second.backward()

    in_turn(main)


@pytest.mark.narrow({"each_backend": "shm"})
def test_a_reducer_without_outputs_keeps_its_hooks():
    def main():
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        named = [(str(i), p) for i, p in enumerate(parameters)]
        reducer = Reducer(named, dist.group.WORLD)
        for _ in range(4):
            for p in parameters:
                p.grad = None
            reducer.prepare()
            (torch.stack([*parameters]).sum() * (1 + dist.get_rank())).backward()
        return [p.grad.tolist() for p in parameters]

    assert run_ranks(main, 2) == [[[1.5, 1.5]] * 3] * 2


OPTIONS = [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0}]


@pytest.mark.parametrize("options", OPTIONS)
def test_no_sync_after_a_forward_without_a_backward(options):
    """What it accumulates is sent later, on a rank that expects another backward, too."""

    def main():
        twins = Twins(**options)
        twins.clear()
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        if dist.get_rank() == 0:
            twins.net(x)  # only to look at it
        with twins.net.no_sync():
            squares(twins.net, 2 * x).backward()
        squares(twins.twin, 2 * x).backward()
        for p, q in zip(twins.net.parameters(), twins.twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        twins.check()
        twins.clear()
        twins.check()

    in_turn(main)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", [range(1, 4), range(1)])
def test_one_loss_of_a_forward_and_one_under_no_sync(first, options):
    """What the second brings before backward reaches the first one's output takes part."""

    def main():
        twins = Twins(**options)
        for _ in range(2):
            twins.clear()
            x = torch.full((2, 4), 1.0 + dist.get_rank())
            ours = twins.net(x, first)
            with twins.net.no_sync():
                both = ours.square().sum() + squares(twins.net, 2 * x)
            both.backward()
            (squares(partial(twins.twin, use=first), x) + squares(twins.twin, 2 * x)).backward()
            average_used(twins.twin)
            twins.check_gradients()

    in_turn(main)
