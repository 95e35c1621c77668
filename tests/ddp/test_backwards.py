"""Backwards of every kind: repeated, with a graph, compiled, scaled, with the optimizer inside."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp import naive
from ddp.common import OneProcess, assert_good_step, assert_same, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import GradwireError

pytestmark = pytest.mark.usefixtures("each_backend")
OPTIONS = [
    {},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 70), nn.Tanh(), nn.Linear(70, 300), nn.Linear(300, 2))


def batch(rank, step=0):
    return torch.full((2, 4), (1.0 + rank + step) / 3)


def own_batch(step=0):
    return batch(dist.get_rank(), step)


def average(net):
    naive.average_gradients(dist.group.WORLD, net.parameters())


# -- programs whose gradients are those of one process ----------------------------------------


def once(net, rank, step):
    net(batch(rank, step)).square().mean().backward()


def repeated(net, rank, step):
    """Each backward is reduced: the gradients are the sum of both means."""
    loss = net(batch(rank, step)).square().mean()
    loss.backward(retain_graph=step > 0)
    if step:
        loss.backward()


def accumulated(net, rank, step):
    with net.no_sync():
        for i in range(2):
            net(batch(rank, step + i)).square().mean().backward()
    net(batch(rank, step + 2)).square().mean().backward()


def written_output(net, rank, step):
    """A view that is written in place has another node, and its hooks are left behind."""
    out = net(batch(rank, step))
    out += 1
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def policy(net, rank, step):
    distribution, value = net(batch(rank, step))
    value.square().sum().backward(retain_graph=True)
    distribution.mean.square().sum().backward()


def far_inside(net, rank, step):
    y = net(batch(rank, step)).result.of[0]["y"]
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


def penalty(net, rank, step):
    x = batch(rank, step).requires_grad_()
    out = net(x).square().mean()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gradient.square().sum()).backward()


class Policy(nn.Module):
    """Returns a distribution, which is no container, and a value."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        y = self.body(x)
        normal = torch.distributions.Normal(y.tanh(), 1.0)
        return torch.distributions.Independent(normal, 1), y.sum(1)


class Refusing(Mapping):
    """A mapping that has nothing for its own keys."""

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        return iter(["words"])

    def __len__(self):
        return 1


@dataclass
class Half:
    """Its second field is never set."""

    given: int
    unset: int = field(init=False)


class Result(nn.Module):
    """Returns an object with a result far inside, and things that nobody should look at."""

    def forward(self, x):
        result = types.SimpleNamespace(of=[{"y": x * 1}], words=[*range(9999)], half=Half(1))
        result.other, result.itself, result.torch = Refusing(), {"result": result}, torch
        result.itself["itself"] = result.itself
        return types.SimpleNamespace(result=result)


PROGRAMS = {
    "written output": (written_output, lambda: nn.Sequential(mlp(), nn.Flatten(0))),
    "output of another class": (policy, Policy),
    "output of any kind": (far_inside, lambda: nn.Sequential(mlp(), Result())),
    "penalty on gradients": (penalty, mlp),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *product(PROGRAMS, OPTIONS),
        ("repeated", {"static_graph": True}),
        ("accumulated", {"lazy_bucket_allocation": True, "find_unused_parameters": True}),
    ],
)
def test_programs(name, options, same_as_one_process):
    """The fuzzer's models have repeated and accumulated backwards with other options."""
    of_mlp = {"repeated": (repeated, mlp), "accumulated": (accumulated, mlp)}
    program, model = (PROGRAMS | of_mlp)[name]
    same_as_one_process(program, options=options, model=model)


@pytest.mark.parametrize("hook", [None, hooks.all_reduce])
def test_delayed_parameters_travel_last(hook, same_as_one_process):
    def options(module):
        delayed = [(n, p) for n, p in module.named_parameters() if n.startswith("3.")]
        return {
            "delay_all_reduce_named_params": delayed,
            "param_to_hook_all_reduce": module[0].weight,
        }

    def check(net):
        assert sorted(net.reducer.buckets[-1]) == ["3.bias", "3.weight"]

    same_as_one_process(once, options=options, hook=hook, model=mlp, check=check)


# -- others -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_create_graph(options):
    """The values are reduced, and the history of this rank's gradients goes on from them."""
    twin = mlp().append(nn.Linear(2, 1 << 19))  # 4 MiB: on Gloo, its gradient is reduced in place
    net = DistributedDataParallel(copy.deepcopy(twin), **options)
    for step in range(3):
        for model in (net, twin):
            model.zero_grad()
            model(own_batch(step)).square().mean().backward(create_graph=True)
        locals_ = [p.grad for p in twin.parameters()]
        reduced = [p.grad.detach().clone() for p in twin.parameters()]
        for value in reduced:
            dist.all_reduce(value.div_(dist.get_world_size()))
        for p, want in zip(net.parameters(), reduced, strict=True):
            torch.testing.assert_close(p.grad.detach(), want)
        second = [
            torch.autograd.grad(sum(g.sum() for g in grads), list(model.parameters()))
            for model, grads in ((net, [p.grad for p in net.parameters()]), (twin, locals_))
        ]
        for a, b in zip(*second, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.narrow({"reentrant": False}, {"reentrant": True, "options": {}})
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", OPTIONS[:2])
@on_ranks(2)
def test_a_checkpoint_around_the_module(options, reentrant):
    """What it computes again runs within the backward that is reduced."""
    rank, checkpointed = dist.get_rank(), partial(checkpoint, use_reentrant=reentrant)
    net, twin = DistributedDataParallel(mlp(), **options), mlp()
    x, y = own_batch().requires_grad_(), own_batch(1).requires_grad_()
    for _ in range(3):
        net.zero_grad()
        twin.zero_grad()
        n = [1.0 + rank, 2.0 + 3 * rank]
        with net.no_sync():
            net.weight(n[0])
            checkpointed(net, x).square().mean().backward()
        net.weight(n[1])
        checkpointed(net, y).square().mean().backward()
        for weight, batch in zip(n, (x, y), strict=True):
            (weight * twin(batch).square().mean()).backward()
        naive.weighted_average(dist.group.WORLD, twin.parameters(), sum(n))
        assert_same(net, twin)
    assert net.reducer.rebuilt != net.find_unused_parameters  # ranks started over in no step

    net.zero_grad()
    twin.zero_grad()
    (net(x).square().mean() + checkpointed(net, y).square().mean()).backward()
    (twin(x).square().mean() + twin(y).square().mean()).backward()
    average(twin)
    assert_same(net, twin)


@pytest.mark.narrow({"reentrant": False})
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_checkpoint_of_more_than_the_module(reentrant):
    """It computes the module again before backward has come to the module's outputs."""
    net, twin = DistributedDataParallel(mlp()), mlp()
    rank, checkpointed = dist.get_rank(), partial(checkpoint, use_reentrant=reentrant)
    with net.join():
        for step in range(1 + 2 * rank):
            net.zero_grad()
            batch = own_batch(step).requires_grad_()
            checkpointed(lambda x: net(x).tanh().square(), batch).sum().backward()
            if not step:
                twin(batch).tanh().square().sum().backward()
                average(twin)
                assert_same(net, twin)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_modules(inside, same_as_one_process):
    """The reducer stays outside the compiled graph, whichever of the two is compiled."""

    def program(net, rank, step):
        is_whole = not inside and not isinstance(net, OneProcess)
        call = torch.compile(net, backend="aot_eager") if is_whole else net
        call(batch(rank, step)).square().mean().backward()

    def model():
        return torch.compile(mlp(), backend="aot_eager") if inside else mlp()

    same_as_one_process(program, model=model)


@on_ranks(2)
def test_compiled_autograd_is_refused():
    """Nothing tells there that a backward has ended: gradients would stay local."""
    compiled = importlib.import_module("torch._dynamo.compiled_autograd")
    net = DistributedDataParallel(mlp())
    with (
        compiled._enable(lambda graph: graph),
        pytest.raises(GradwireError, match="compiled autograd"),
    ):
        net(own_batch()).square().mean().backward()
    assert_good_step(net)


@pytest.mark.parametrize(
    ("registered", "options"),
    [
        ("before wrapping", {}),
        ("after wrapping", {"gradient_as_bucket_view": True}),
        ("after a step", {"find_unused_parameters": True}),
        ("late", {}),
    ],
)
@on_ranks(2)
def test_an_optimizer_in_backward_steps_with_reduced_gradients_only(registered, options):
    from torch.distributed.optim import _apply_optimizer_in_backward

    def register():
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})

    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    x = torch.tensor([[1.0 + dist.get_rank()]])
    if registered == "before wrapping":
        register()
    net = DistributedDataParallel(module, **options)
    if registered == "after wrapping":
        register()
    if registered == "after a step":
        net(x).sum().backward()
        net.zero_grad()
        register()
    found = []
    for local in (True, False, True, True, False):
        with net.no_sync(enabled=local):
            out = net(x).sum()
        if registered == "late" and not local and not found:
            register()  # between a forward and its backward
        out.backward()
        if not local:
            found.append(module.weight.item())
        assert (module.weight.grad is None) != local
    assert found == [-3.0, -7.5]
