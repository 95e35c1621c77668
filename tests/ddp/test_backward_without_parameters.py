"""Backward without any parameter on one rank, and with parameters on others."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import assert_average, assert_same, average_used, on_ranks
from gradwire.ddp import DistributedDataParallel

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


def batch(rank, step=0, width=4):
    return torch.full((2, width), (1.0 + rank + step) / width, requires_grad=True)


def own_input(step=0, width=4):
    return batch(dist.get_rank(), step, width)


UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, SMALL])
@pytest.mark.parametrize("width", [4, 1100])
@pytest.mark.parametrize("hook", [None, "all_reduce"])
@pytest.mark.narrow({"options": {}, "width": 4}, {"options": SMALL, "width": 1100, "hook": None})
def test_a_rank_that_uses_no_parameter(options, width, hook, same_as_one_process):
    """It takes part with zeros, in each backward through its outputs."""
    takes = [[[], [0, 1]], [[1], []], [[], []], [[0], [1]], [[], [0]]]

    def program(net, rank, step):
        for i in (3, 4) if step == 4 else (step,):  # the last adds to the gradients of another
            loss = net(batch(rank, i, width), takes[i][rank]).square().sum()
            loss.backward(retain_graph=True)
            if i == 1:
                loss.backward()

    options = {**options, **UNUSED}
    same_as_one_process(program, 2, options, hook, model=partial(Layers, width), steps=5)


def test_a_rank_that_uses_no_parameter_after_accumulation(same_as_one_process):
    def program(net, rank, step):
        with net.no_sync():
            net(batch(rank, step), [0]).sum().backward()
        net(batch(rank, step), [1] if rank else []).sum().backward()

    same_as_one_process(program, 2, UNUSED, model=Layers, steps=2)


@on_ranks(2)
def test_a_rank_that_uses_no_parameter_with_manual_finalization():
    net = DistributedDataParallel(Layers(), find_unused_parameters=True)
    net.require_manual_backward_finalization = True
    net(own_input(), [[], [0, 1]][dist.get_rank()]).sum().backward()
    net.finalize_backward()
    assert [p.grad is None for p in net.parameters()] == [False] * 4


@on_ranks(2)
def test_a_module_that_returns_the_output_of_an_inner_one():
    class Outer(Layers):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, take):
            x = self.inner(x, [0])
            return super().forward(x, take) if take else x

    twin = Outer(Layers())
    net = copy.deepcopy(twin)
    net.inner = DistributedDataParallel(net.inner, find_unused_parameters=True)
    inner = [f"inner.{name}" for name, _ in net.inner.named_parameters()]
    net._ddp_params_and_buffers_to_ignore = inner
    net = DistributedDataParallel(net, find_unused_parameters=True)
    twin.load_state_dict({n.replace("module.", ""): v for n, v in net.state_dict().items()})
    for model in (net, twin):
        model(own_input(), [0, 1] if dist.get_rank() else []).square().sum().backward()
    assert_average(net, twin)


@on_ranks(2)
def test_two_modules_and_a_loss_that_uses_parameters():
    """A gradient that comes before the outputs' on one rank does not change the order there."""
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


class Whole(Layers):
    """The graph of the outputs has no parameters: what is unused shows when backward ends."""

    def forward(self, x, take):
        return checkpoint(super().forward, x, take, use_reentrant=True)


@pytest.mark.parametrize("take", [[[0], [0]], [[], [0, 1]]])
def test_a_reentrant_checkpoint_around_all_layers(take, same_as_one_process):
    def program(net, rank, step):
        net(batch(rank, step), take[rank]).sum().backward()

    same_as_one_process(program, 2, UNUSED, model=Whole, steps=2)


@pytest.mark.parametrize("take", [[[], [0]], [[1], [0, 1]]])
def test_a_repeated_backward_in_which_the_loss_uses_parameters(take, same_as_one_process):
    """On a rank where only the loss uses it, its gradient comes before the outputs'."""

    def program(net, rank, step):
        loss = net(batch(rank, step), take[rank]).sum()
        loss = loss + net.module.layers[0].weight.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    same_as_one_process(program, 2, UNUSED, model=Layers)


@on_ranks(2)
def test_backwards_without_parameters_send_nothing():
    """On a rank that uses nothing as on others: gradients of inputs, and of frozen modules."""
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
