"""Transforms of `torch.func` through the wrapper give what they give without it.

A transform is the rank's own: nothing is sent. A backward of what it returned is reduced.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as by_autograd
from torch.func import (
    functional_call,
    functionalize,
    grad,
    vmap,
)
from torch.utils import _pytree as pytree

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError
from gradwire.testing import run_ranks

pytestmark = [
    pytest.mark.usefixtures("each_backend"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


class Net(nn.Module):
    """Two layers, with buffers or without."""

    def __init__(self, *, buffers):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4).eval() if buffers else nn.Identity()
        self.drop = nn.Dropout(0.5).eval()
        if buffers:
            self.register_buffer("factor", torch.tensor(2.0))
            self.norm.running_mean.fill_(0.25)

    def forward(self, x):
        x = x if x.dim() > 1 else x.unsqueeze(0)
        x = self.drop(self.norm(torch.tanh(self.hidden(x))))
        return self.last(x) * getattr(self, "factor", 1.0)


def detached(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def own(net):
    return dict(net.named_parameters())


def loss(net, parameters, x):
    return functional_call(net, parameters, (x,)).square().mean()


def of_input(net):
    return lambda x: net(x).sin().sum()


def tangents(tree):
    return pytree.tree_map(lambda t: torch.linspace(-1, 1, t.numel()).view_as(t), tree)


def grad_of_input(net, x):
    return grad(of_input(net))(x)


def grad_in_inference_mode(net, x):
    with torch.inference_mode():
        return grad(of_input(net))(x).clone()


def grad_under_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return grad(of_input(net))(x)


def ensemble(net, x):
    many = {n: torch.stack([p, 2 * p]) for n, p in detached(net).items()}
    return vmap(lambda p: functional_call(net, p, (x,)))(many)


def called_with_parameters(net, x):
    return functional_call(net, {n: 2 * p for n, p in detached(net).items()}, (x,))


def called_with_buffers(net, x):
    buffers = {n: b + 1 for n, b in net.named_buffers()}
    factor = {n: b for n, b in buffers.items() if n.endswith("factor")}
    return grad(lambda b: functional_call(net, b, (x,)).sum())(factor), buffers


def called_with_leaves(net, x):
    leaves = {n: p.clone().requires_grad_() for n, p in detached(net).items()}
    loss(net, leaves, x).backward()
    return [leaf.grad for leaf in leaves.values()]


def dual_numbers(net, x):
    with forward_ad.dual_level():
        out = net(forward_ad.make_dual(x, tangents(x)))
        return forward_ad.unpack_dual(out)


def batched_cotangents(net, x):
    out = net(x.requires_grad_())
    many = torch.eye(out.numel()).view(-1, *out.shape)
    return torch.autograd.grad(out, [x], many, is_grads_batched=True)


def batched_cotangents_of_parameters(net, x):
    out = net(x)
    many = torch.eye(out.numel()).view(-1, *out.shape)
    return torch.autograd.grad(out, [*net.parameters()], many, is_grads_batched=True)


def step_in_the_loop(net, x):
    before = own(net)
    gradients = grad(loss, argnums=1)(net, before, x)
    after = {n: p - 0.1 * gradients[n] for n, p in before.items()}
    loss(net, after, x).backward()


def penalty(net, x):
    grad(of_input(net))(x).square().sum().backward()


def local_penalty(net, x):
    if isinstance(net, DistributedDataParallel):
        with net.no_sync():
            penalty(net, x)
    else:
        penalty(net, x)
    net(x).sum().backward()


# the programs: every function of a network and an input, and these
PROGRAMS = {
    "grad_of_own_parameters": lambda net, x: grad(loss, argnums=1)(net, own(net), x),
    "gradients_of_samples": lambda net, x: vmap(grad(loss, argnums=1), in_dims=(None, None, 0))(
        net, detached(net), x
    ),
    "functionalized": lambda net, x: functionalize(net)(x),
    "autograds_jacobian": lambda net, x: (
        by_autograd.jacobian(net, x),
        by_autograd.jacobian(net, x, vectorize=True),
    ),
    "autograds_hessian": lambda net, x: (
        by_autograd.hessian(of_input(net), x),
        by_autograd.hvp(of_input(net), x, tangents(x)),
    ),
    **{
        name: f
        for name, f in list(globals().items())
        if getattr(f, "__module__", "") == __name__
        and getattr(f, "__code__", None) is not None
        and f.__code__.co_varnames[: f.__code__.co_argcount] == ("net", "x")
    },
}


def inputs(step=0):
    return torch.linspace(-1, 1, 12).view(4, 3) * (dist.get_rank() + step + 1) / 2


def step(net, twin, number):
    """A plain step of both."""
    for model in (net, twin):
        model.zero_grad()
        model(inputs(number)).square().sum().backward()
    check_gradients(net, twin, f"of plain step {number}")


def check_gradients(net, twin, what):
    """Gradients of the wrapper are the mean over ranks of the twin's."""
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), what
        if q.grad is not None:
            mean = q.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(p.grad, mean / dist.get_world_size(), rtol=1e-5, atol=1e-6)


def leaves(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def check_program(program, *, buffers, steps, **options):
    net = DistributedDataParallel(Net(buffers=buffers), **options)
    twin = Net(buffers=buffers)
    for number in range(steps):
        step(net, twin, number)
    for _ in range(2):
        net.zero_grad()
        twin.zero_grad()
        got, expected = leaves(program(net, inputs())), leaves(program(twin, inputs()))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        check_gradients(net, twin, "of the program")
    for number in range(3):
        step(net, twin, number)


def failures(steps, buffers, options):
    failed = {}
    for name, program in PROGRAMS.items():
        try:
            check_program(program, buffers=buffers, steps=steps, **options)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return failed


@pytest.mark.narrow(
    {"steps": 0, "buffers": False, "options": {}, "each_backend": "gloo"},
    {"steps": 1, "buffers": True, "options": {}, "each_backend": "shm"},
    {"steps": 2, "buffers": False, "options": {"find_unused_parameters": True}},
)
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_programs_give_what_they_give_without_the_wrapper(steps, buffers, options):
    """After so many plain steps, and with plain steps after them."""
    assert len(PROGRAMS) > 15
    for failed in run_ranks(failures, 2, args=(steps, buffers, options)):
        assert not failed


@on_ranks(2)
def test_functional_call_when_other_modules_were_made():
    net, twin = DistributedDataParallel(Net(buffers=False)), Net(buffers=False)
    nn.Linear(2, 2)
    torch.testing.assert_close(
        called_with_parameters(net, inputs()), called_with_parameters(twin, inputs())
    )
    step(net, twin, 0)
    net.module.last.bias = nn.Parameter(torch.ones(2))
    called_with_parameters(net, inputs())  # does not hide what was replaced
    with pytest.raises(ArgumentError, match=r"\['last.bias'\] were added or replaced"):
        net(inputs())
