"""Transforms of `torch.func` through the wrapper give what they give without it.

A transform is the rank's own: nothing is sent. A backward of what it returned is reduced. The
fuzzer's programs have the common transforms; here are the others.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as by_autograd
from torch.func import functional_call, functionalize, grad, vmap
from torch.utils._pytree import tree_leaves

from ddp.common import assert_good_step, mlp, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError

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
        x = self.drop(self.norm(torch.tanh(self.hidden(x))))
        return self.last(x) * getattr(self, "factor", 1.0)


def detached(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def loss(net, parameters, x):
    return functional_call(net, parameters, (x,)).square().mean()


def of_input(net):
    return lambda x: net(x).sin().sum()


# -- functions of a network, wrapped or not, and an input ------------------------------------------


def grad_in_inference_mode(net, x):
    with torch.inference_mode():
        return grad(of_input(net))(x).clone()


def grad_under_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return grad(of_input(net))(x)


def ensemble(net, x):
    many = {n: torch.stack([p, 2 * p]) for n, p in detached(net).items()}
    return vmap(lambda p: functional_call(net, p, (x,)))(many)


def called_with_buffers(net, x):
    buffers = {n: b + 1 for n, b in net.named_buffers()}
    factor = {n: b for n, b in buffers.items() if n.endswith("factor")}
    return grad(lambda b: functional_call(net, b, (x,)).sum())(factor), buffers


def called_with_leaves(net, x):
    leaves = {n: p.clone().requires_grad_() for n, p in detached(net).items()}
    loss(net, leaves, x).backward()
    return [leaf.grad for leaf in leaves.values()]


def functionalized(net, x):
    return functionalize(net)(x)


def dual_numbers(net, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.cos())))


def autograds_jacobian_and_hessian(net, x):
    both = [by_autograd.jacobian(net, x, vectorize=v) for v in (False, True)]
    return *both, by_autograd.hessian(of_input(net), x), by_autograd.hvp(of_input(net), x, x.cos())


def batched_cotangents(net, x):
    out = net(x.requires_grad_())
    many = torch.eye(out.numel()).view(-1, *out.shape)
    return torch.autograd.grad(out, [x, *net.parameters()], many, is_grads_batched=True)


def step_in_the_loop(net, x):
    before = dict(net.named_parameters())
    gradients = grad(loss, argnums=1)(net, before, x)
    after = {n: p - 0.1 * gradients[n] for n, p in before.items()}
    loss(net, after, x).backward()


def local_penalty(net, x):
    with getattr(net, "no_sync", torch.enable_grad)():
        grad(of_input(net))(x).square().sum().backward()
    net(x).sum().backward()


PROGRAMS = [
    *(grad_in_inference_mode, grad_under_autocast, ensemble, called_with_buffers),
    *(called_with_leaves, functionalized, dual_numbers, autograds_jacobian_and_hessian),
    *(batched_cotangents, step_in_the_loop, local_penalty),
]


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("reverse", [False, True])
def test_programs_give_what_they_give_without_the_wrapper(
    reverse, options, buffers, same_as_one_process
):
    """One after the other, with plain steps in between."""
    programs = PROGRAMS[:: -1 if reverse else 1]

    def program(net, rank, step):
        x = torch.linspace(-1, 1, 12).view(4, 3) * (rank + step + 1) / 9
        if step % 2:
            net(x).square().sum().backward()
            return
        alone = copy.deepcopy(net.module)
        run = programs[step // 2]
        for got, want in zip(tree_leaves(run(net, x)), tree_leaves(run(alone, x)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=run.__name__)

    steps = 2 * len(PROGRAMS)
    same_as_one_process(
        program, options=options, model=lambda: Net(buffers=buffers), steps=steps, atol=1e-5,
        rtol=1e-5,
    )  # fmt: skip


@on_ranks(2)
def test_functional_call_when_other_modules_were_made():
    net = DistributedDataParallel(mlp())
    nn.Linear(2, 2)
    x, doubled = torch.ones(2, 4) + dist.get_rank(), {n: 2 * p for n, p in detached(net).items()}
    plain = {n.removeprefix("module."): p for n, p in doubled.items()}
    want = functional_call(net.module, plain, (x,))
    torch.testing.assert_close(functional_call(net, doubled, (x,)), want)
    assert_good_step(net)
    net.module[4].bias = nn.Parameter(torch.ones(2))
    functional_call(net, doubled, (x,))  # does not hide what was replaced
    with pytest.raises(ArgumentError, match=r"\['4.bias'\] were added or replaced"):
        net(x)
