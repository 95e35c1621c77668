"""Backwards through several wrappers, of which some are frozen, as in a GAN."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import assert_average, assert_same_on_ranks, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, Reducer
from gradwire.errors import NotSupportedError, PeerFailedError

pytestmark = pytest.mark.usefixtures("each_backend")
WIDTH = 4


class Layers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for _ in range(2)
        ).double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x * 2


def one_input(step=0):
    value = (1.0 + dist.get_rank() + step) / WIDTH
    return torch.full((2, WIDTH), value, dtype=torch.float64, requires_grad=True)


# -- the same parameters ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (lambda m: m, lambda m: m, ("layers.0.0.weight", "Layers", "layers.0.0.weight", "Layers")),
        (
            lambda m: m,
            lambda m: nn.Sequential(m.layers[1][2]),
            ("0.weight", "Sequential", "layers.1.2.weight", "Layers"),
        ),
        (
            lambda m: m.layers[1],
            lambda m: m,
            ("layers.1.0.weight", "Layers", "0.weight", "Sequential"),
        ),
    ],
)
@on_ranks(2)
def test_two_wrappers_of_one_parameter(first, second, names):
    """The one that was used first goes on; the other one raises before anything is sent."""
    module = Layers(5)
    net, other = DistributedDataParallel(first(module)), DistributedDataParallel(second(module))
    twin = copy.deepcopy(net.module)
    for model in (net, twin):
        model(one_input()).square().sum().backward()
    assert_average(net, twin)
    before = dist.group.WORLD._get_sequence_number_for_group()
    with pytest.raises(NotSupportedError) as caught:
        other(one_input())
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    assert "parameter {} of {} is also {} of {}".format(*names) in str(caught.value)
    reducer = Reducer([("weight", next(net.parameters()))], dist.group.WORLD)
    net.zero_grad()
    twin.zero_grad()
    for model in (net, twin):
        model(one_input()).square().sum().backward()
    assert_average(net, twin)
    with pytest.raises(NotSupportedError, match=r"weight of \(a reducer\) is also"):
        reducer.prepare()


@pytest.mark.parametrize("how", ["kept", "in a cycle", "closed"])
@on_ranks(2)
def test_a_module_that_is_wrapped_again(how):
    """Earlier wrappers reduce nothing, and apply none of their weights."""
    module, twin = Layers(5), Layers(5)
    kept, waiting = [], []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        net = DistributedDataParallel(module, **options)
        twin.load_state_dict(module.state_dict())
        for step in range(2):
            for model in (net, twin):
                model.zero_grad()
                # the last backward goes around the wrapper
                forward = model if step == 0 else getattr(model, "module", model)
                forward(one_input()).square().sum().backward()
            assert_average(net, twin)
        if how == "in a cycle":
            net.itself = [net]
        else:
            kept.append(net)
            waiting.append(net(one_input()).sum())
            net.weight(3)
        if how == "closed":
            net.reducer.close()
    for loss in waiting[:-1] if how == "kept" else ():
        with pytest.raises(NotSupportedError, match="which another wrapper has"):
            loss.backward()
    for net in kept[:-1]:
        with pytest.raises(NotSupportedError, match="which another wrapper has"):
            net(one_input())


# -- in several groups ------------------------------------------------------------------------


@on_ranks(2)
def test_an_error_among_wrappers_of_two_groups_reaches_both():
    rank = dist.get_rank()
    torch.manual_seed(0)
    nets = [
        DistributedDataParallel(
            Layers(5), process_group=dist.new_group(), find_unused_parameters=True
        )
        for _ in range(2)
    ]
    order = [0, 1] if rank == 0 else [1, 0]
    for step in range(3):
        loss = sum(nets[i](one_input(step)).sum() for i in order)
        if step != 1:
            loss.backward()
            continue
        if rank == 0:  # after the first of the two has come to its end
            weight = nets[1].module.layers[0][0].weight
            handle = weight.register_hook(raise_as_backward_ends)
        with pytest.raises((ArithmeticError, PeerFailedError)):
            backward_and_forward(loss, nets[0])
        if rank == 0:
            handle.remove()
        for net in nets:
            net.zero_grad()
        with suppress(PeerFailedError):
            nets[1](one_input())
    assert_same_on_ranks([p.grad for net in nets for p in net.parameters()])


@on_ranks(2, timeout=40)
def test_a_repeated_backward_of_wrappers_of_two_groups():
    """Ranks reach them in different orders, with hooks of several collectives for each bucket."""
    nets = []
    for _ in range(2):
        net = DistributedDataParallel(Layers(5), process_group=dist.new_group(), bucket_cap_mb=1e-6)
        net.register_comm_hook(None, hooks.BlockQuantization(8))
        nets.append(net)
    for step in range(2):
        order = nets if dist.get_rank() else nets[::-1]
        loss = sum(net(one_input(step)).square().sum() for net in order)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_on_ranks([p.grad for net in nets for p in net.parameters()])


def backward_and_forward(loss, net):
    loss.backward()
    net(one_input())


def raise_as_backward_ends(grad):
    torch.autograd.Variable._execution_engine.queue_callback(raise_here)


def raise_here():
    raise ArithmeticError("here")
