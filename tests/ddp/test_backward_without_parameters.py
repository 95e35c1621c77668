"""Backward without any parameter on one rank, and with parameters on others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import assert_same, average_used
from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")
SMALL = {"bucket_cap_mb": 1e-6}


class Layers(nn.Module):
    """Layers, of which a forward takes those it is given: it may be given none."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x, take):
        for i in take:
            x = self.layers[i](x).tanh()
        return x * 2


def own_input(step=0, width=4):
    return torch.full((2, width), (1.0 + dist.get_rank() + step) / width, requires_grad=True)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, SMALL])
@pytest.mark.parametrize("width", [4, 1100])
@pytest.mark.parametrize("hook", [None, "all_reduce"])
@pytest.mark.narrow({"options": {}, "width": 4}, {"options": SMALL, "width": 1100, "hook": None})
def test_a_rank_that_uses_no_parameter(options, width, hook):
    """It takes part with zeros, in each backward through its outputs."""

    def main():
        net = DistributedDataParallel(Layers(width), find_unused_parameters=True, **options)
        net.register_comm_hook(None, hook)
        twin = copy.deepcopy(net.module)
        takes = [[[], [0, 1]], [[1], []], [[], []], [[0], [1]], [[], [0]]]
        for step, take in enumerate(takes):
            if step != 4:  # there, gradients of the step before are there
                net.zero_grad()
                twin.zero_grad()
            for model in (net, twin):
                loss = model(own_input(step, width), take[dist.get_rank()]).square().sum()
                loss.backward(retain_graph=True)
                if step == 1:
                    loss.backward()
            average_used(twin)
            assert_same(net, twin)

    run_ranks(main, 2)


def test_a_rank_that_uses_no_parameter_after_accumulation():
    def main():
        net = DistributedDataParallel(Layers(), find_unused_parameters=True)
        twin = copy.deepcopy(net.module)
        with net.no_sync():
            net(own_input(), [0]).sum().backward()
        net(own_input(), [[], [1]][dist.get_rank()]).sum().backward()
        twin(own_input(), [0]).sum().backward()
        twin(own_input(), [[], [1]][dist.get_rank()]).sum().backward()
        average_used(twin)
        assert_same(net, twin)

    run_ranks(main, 2)


def test_a_rank_that_uses_no_parameter_with_manual_finalization():
    def main():
        net = DistributedDataParallel(Layers(), find_unused_parameters=True)
        net.require_manual_backward_finalization = True
        net(own_input(), [[], [0, 1]][dist.get_rank()]).sum().backward()
        net.finalize_backward()
        return [p.grad is None for p in net.parameters()]

    assert run_ranks(main, 2) == [[False] * 4] * 2


class Skipped(Layers):
    """Hands its input on as it is where it uses nothing."""

    def forward(self, x, take):
        return super().forward(x, take) if take else x


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("chained", [False, True])
def test_one_of_two_modules_skipped_on_one_rank(chained, skipped, leaf):
    """Backward reaches both in the same order on every rank: their buckets must not meet."""

    def main():
        torch.manual_seed(0)
        nets = [DistributedDataParallel(Skipped(), find_unused_parameters=True) for _ in range(2)]
        twins = [copy.deepcopy(net.module) for net in nets]
        takes = [[0], [0, 1]]
        takes[skipped] = takes[skipped] if dist.get_rank() else []
        for a, b in (nets, twins):
            x = own_input() if leaf else own_input() * 1
            first = a(x, takes[0])
            second = b(first if chained else x, takes[1])
            (first.square().sum() + 3 * second.square().sum()).backward()
        for net, twin in zip(nets, twins, strict=True):
            average_used(twin)
            assert_same(net, twin)

    run_ranks(main, 2)


def test_a_module_that_returns_the_output_of_an_inner_one():
    class Outer(Layers):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, take):
            x = self.inner(x, [0])
            return super().forward(x, take) if take else x

    def main():
        twin = Outer(Layers())
        net = copy.deepcopy(twin)
        net.inner = DistributedDataParallel(net.inner, find_unused_parameters=True)
        inner = [f"inner.{name}" for name, _ in net.inner.named_parameters()]
        net._ddp_params_and_buffers_to_ignore = inner
        net = DistributedDataParallel(net, find_unused_parameters=True)
        twin.load_state_dict({n.replace("module.", ""): v for n, v in net.state_dict().items()})
        for model in (net, twin):
            model(own_input(), [0, 1] if dist.get_rank() else []).square().sum().backward()
        average_used(twin)
        assert_same(net, twin)

    run_ranks(main, 2)


def test_two_modules_and_a_loss_that_uses_parameters():
    """A gradient that comes before the outputs' on one rank does not change the order there."""

    def main():
        modules = [Layers(60), Layers(60)]
        nets = [DistributedDataParallel(m, find_unused_parameters=True, **SMALL) for m in modules]
        twins = copy.deepcopy(modules)
        for step in range(2):
            x, take = own_input(step, 60), [0, 1] if dist.get_rank() else [1]
            for models, inner in ((nets, modules), (twins, twins)):
                loss = inner[0].layers[0].weight.square().sum()
                outputs = [m(x, take) for m in models]
                (loss + sum(h.square().sum() for h in outputs)).backward()
            for twin in twins:
                average_used(twin)
            for net, twin in zip(nets, twins, strict=True):
                assert_same(net, twin)
            for model in (*nets, *twins):
                model.zero_grad()

    run_ranks(main, 2)


@pytest.mark.parametrize("take", [[[0], [0]], [[], [0, 1]]])
def test_a_reentrant_checkpoint_around_all_layers(take):
    """The graph of the outputs has no parameters: what is unused shows when backward ends."""

    class Whole(Layers):
        def forward(self, x, take):
            return checkpoint(super().forward, x, take, use_reentrant=True)

    def main():
        net = DistributedDataParallel(Whole(), find_unused_parameters=True)
        twin = copy.deepcopy(net.module)
        for model in (net, twin):
            model(own_input(), take[dist.get_rank()]).sum().backward()
        average_used(twin)
        assert_same(net, twin)

    run_ranks(main, 2)


@pytest.mark.parametrize("take", [[[], [0]], [[1], [0, 1]]])
def test_a_repeated_backward_in_which_the_loss_uses_parameters(take):
    """On a rank where only the loss uses it, its gradient comes before the outputs'."""

    def main():
        net = DistributedDataParallel(Layers(), find_unused_parameters=True)
        twin = copy.deepcopy(net.module)
        for step in range(2):
            for model in (net, twin):
                loss = model(own_input(step), take[dist.get_rank()]).sum()
                loss = loss + getattr(model, "module", model).layers[0].weight.square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            average_used(twin)
            assert_same(net, twin)
            net.zero_grad()
            twin.zero_grad()

    run_ranks(main, 2)


def test_backwards_without_parameters_send_nothing():
    """On a rank that uses nothing as on others: gradients of inputs, and of frozen modules."""

    def main():
        net = DistributedDataParallel(Layers(), find_unused_parameters=True)
        x, other = own_input(), torch.ones(4, requires_grad=True)
        before = dist.group.WORLD._get_sequence_number_for_group()
        out = net(x, [[], [0, 1]][dist.get_rank()]).sum()
        torch.autograd.grad(out, x, retain_graph=True, create_graph=True)
        between = x * other
        out = net(between, [[], [0, 1]][dist.get_rank()]).sum()
        torch.autograd.grad(out, between, retain_graph=True)
        out.backward(inputs=[x], retain_graph=True)
        assert dist.group.WORLD._get_sequence_number_for_group() == before
        out.backward()
        assert net.module.layers[0].weight.grad.any()
        before = dist.group.WORLD._get_sequence_number_for_group()
        net.requires_grad_(False)
        net(own_input(), [0, 1]).sum().backward()
        assert dist.group.WORLD._get_sequence_number_for_group() == before

    run_ranks(main, 2)
