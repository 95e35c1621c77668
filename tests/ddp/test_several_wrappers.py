"""Backwards through several wrappers, of which some are frozen, as in a GAN."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import assert_average, on_ranks
from gradwire.ddp import DistributedDataParallel, Reducer
from gradwire.errors import NotSupportedError, PeerFailedError
from gradwire.testing import run_ranks

WIDTH, STEPS = 4, 8


class Layers(nn.Module):
    """Layers, of which a forward takes those it is given."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for _ in range(2)
        ).double()

    def forward(self, x, take=(0, 1)):
        for i in take:
            x = x + self.layers[i](x)
        return x * 2


def one_input(step=0):
    value = (1.0 + dist.get_rank() + step) / WIDTH
    return torch.full((2, WIDTH), value, dtype=torch.float64, requires_grad=True)


# -- the same parameters ------------------------------------------------------------------------


@pytest.mark.usefixtures("each_backend")
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


# -- random programs ------------------------------------------------------------------------


def chained(modules, plan, x):
    """What a plan makes of an input: modules one after the other, and beside each other."""
    total = 0.0
    for row, takes in plan:
        y = x
        for i, take in zip(row, takes, strict=True):
            y = modules[i](y, take)
        total = total + y.square().mean()
    return total


def planned(rng, unused, *, alike):
    """Rows of modules, some in several places, with the layers that each takes on this rank."""
    order = rng.choices(range(len(unused)), k=rng.randint(1, len(unused) + 2))
    rows = [order]
    if len(order) > 1 and rng.random() < 0.4:
        cut = rng.randint(1, len(order) - 1)
        rows = [order[:cut], order[cut:]]
    takes = [[(0, 1), (0, 1)], [(0,), (0, 1)], [(), (1,)], [(1,), (1,)]]
    if alike:
        takes = takes[:1]

    def taken(i):
        return (rng.choice(takes) if unused[i] else takes[0])[dist.get_rank()]

    return [(row, [taken(i) for i in row]) for row in rows]


def random_step(rng, nets, twins, unused, pending):
    frozen = {i for i in range(len(nets)) if rng.random() < 0.4}
    # after a forward without a backward, the next backward is reduced, as with PyTorch's
    local = {i for i in range(len(nets)) if rng.random() < 0.15} - pending
    restricted, step = rng.random() < 0.3, rng.random()
    # the path to the parameters that are asked for has to be there on all ranks
    plan = planned(rng, unused, alike=restricted)
    used = [i for row, _ in plan for i in row]
    only = rng.choice(used) if restricted else None
    again = rng.random() < 0.2
    for modules in (nets, twins):
        for i, module in enumerate(modules):
            module.zero_grad()
            module.requires_grad_(i not in frozen)
        with ExitStack() as stack:
            for i in local if modules is nets else ():
                stack.enter_context(modules[i].no_sync())
            loss = chained(modules, plan, one_input(step))
        options = {}
        if only is not None and only not in frozen:
            options["inputs"] = list(modules[only].parameters())
        for last in (False, True) if again else (True,):
            loss.backward(retain_graph=not last, **options)
    touched = set(used) - frozen if only is None or only in frozen else {only}
    pending -= touched
    pending |= set(used) - touched - local
    for i, (net, twin) in enumerate(zip(nets, twins, strict=True)):
        if i not in local and i in used and i not in frozen:
            assert_average(net, twin)


def random_programs(seed):
    rng = random.Random(seed)
    for _ in range(3):
        count = rng.randint(2, 4)
        unused = [rng.random() < 0.4 for _ in range(count)]
        torch.manual_seed(rng.random())
        nets = [
            DistributedDataParallel(
                Layers(rng.choice([3, 400])),
                find_unused_parameters=each,
                gradient_as_bucket_view=rng.random() < 0.3,
                bucket_cap_mb=rng.choice([None, 1e-6]),
            )
            for each in unused
        ]
        twins = [copy.deepcopy(net.module) for net in nets]
        pending: set[int] = set()
        for _ in range(STEPS):
            random_step(rng, nets, twins, unused, pending)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.narrow({"seed": 8}, {"seed": 9, "backend": "shm"})
def test_random_backwards_through_several_wrappers(seed, backend):
    run_ranks(random_programs, 2, backend=backend, args=(seed,))


# -- in several groups ------------------------------------------------------------------------


@pytest.mark.usefixtures("each_backend")
def test_an_error_among_wrappers_of_two_groups_reaches_both():
    def main():
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
        return [p.grad.sum().item() for net in nets for p in net.parameters()]

    first, second = run_ranks(main, 2)
    assert first == second


def backward_and_forward(loss, net):
    loss.backward()
    net(one_input())


def raise_as_backward_ends(grad):
    torch.autograd.Variable._execution_engine.queue_callback(raise_here)


def raise_here():
    raise ArithmeticError("here")
