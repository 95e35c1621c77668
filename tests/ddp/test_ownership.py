"""Memory that autograd, another parameter or the user still reads is not written to."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("each_backend")
SIZES = [20, 2_000, 20_000, 1_200_000]  # 80 B, 8 KB, 80 KB, 4.8 MB: each travels in its own way


class Made(nn.Module):
    """Parameters of given shapes, and a function of them and of a number."""

    def __init__(self, function, **shapes):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        for name, shape in shapes.items():
            dtype = torch.complex64 if name.startswith("complex") else torch.float32
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=dtype)))

    def forward(self, x):
        return self.function(self, x)


def number(step=0):
    return 1.0 + dist.get_rank() + step


def private(parameter):
    """Let a parameter's gradients share memory with nothing, however they are computed."""
    parameter.register_hook(lambda g: None if g is None else g.resolve_conj().resolve_neg().clone())


def check(net, twin, step=""):
    """Gradients of the one are the mean over ranks of those of the other, which get that value."""
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        mean = torch.zeros_like(q) if q.grad is None else q.grad.detach().clone()
        real = torch.view_as_real(mean) if mean.is_complex() else mean
        dist.all_reduce(real.div_(dist.get_world_size()))
        q.grad = mean
        scale = mean.abs().max().item() or 1.0
        error = (p.grad - mean).abs().max().item() / scale
        assert error < 1e-5, f"{name} is off by {error:.0%} of the largest gradient {step}"


def train(make, *, steps=2, set_to_none=True, local=0, hook=None, **options):
    """Steps of ours, held against the plain mean of a twin's gradients."""
    net, twin = DistributedDataParallel(make(), **options), make()
    if hook is not None:
        net.register_comm_hook(None, hook)
    for p in twin.parameters():
        private(p)
    for step in range(steps):
        net.zero_grad(set_to_none)
        twin.zero_grad(set_to_none)
        for _ in range(local):
            with net.no_sync():
                net(number(step)).abs().square().sum().backward()
            twin(number(step)).abs().square().sum().backward()
        net(number(step)).abs().square().sum().backward()
        twin(number(step)).abs().square().sum().backward()
        check(net, twin, f"in step {step}")
    return net


@on_ranks(2)
def test_a_gradient_that_is_queued_for_another_branch():
    """Scaled in place it would halve all that comes before it."""

    def position(m, x):
        return ((m.up * x).tanh().unsqueeze(0) + m.pos.unsqueeze(0)) * x

    def two_views(m, x):
        return ((m.up * x).tanh().view(-1) + m.pos.view(-1)) * x

    for n in SIZES:
        train(lambda n=n: Made(position, up=n, pos=n))
        train(lambda n=n: Made(two_views, up=(n // 4, 4), pos=(4, n // 4)))


@on_ranks(2)
def test_gradients_that_are_read_as_conjugated_or_negated():
    def conjugated(m, x):
        return m.complex_a.conj() * x + m.complex_b * (1 + 2j)

    def negated(m, x):
        return torch._neg_view(m.a) * x + torch._neg_view(m.b)

    for n in SIZES:
        for options in ({}, {"gradient_as_bucket_view": True}):
            train(lambda n=n: Made(conjugated, complex_a=n // 2, complex_b=n // 2), **options)
            train(lambda n=n: Made(negated, a=n, b=n), set_to_none=False, **options)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False, "bucket_cap_mb": 50}])
@on_ranks(2)
def test_kept_gradients_stay_when_others_of_their_bucket_are_absent(options):
    def forward(m, x):
        early = (m.early * x).sum() + (m.batch * x).sum() if x < 3 else 0.0
        return early + m.tiny * x

    net = DistributedDataParallel(
        Made(forward, early=20_000, batch=2_000, tiny=4), find_unused_parameters=True, **options
    )
    for _ in range(3):  # buckets are rebuilt after the first
        net.zero_grad()
        net(number()).sum().backward()
    kept = [(p.grad, p.grad.clone()) for p in net.parameters()]
    for step in (3, 4):
        net.zero_grad()
        net(number(step)).sum().backward()
    for gradient, was in kept:
        assert torch.equal(gradient, was)


@on_ranks(2)
def test_gradients_that_alias_each_other_are_added_up_once():
    def stacked(m, x):
        return torch.stack([m.a, m.b]) * x

    def added(m, x):
        return m.a.view(-1) * 1.0 + (m.b.view(-1) + m.c.view(-1)) * x

    for n in SIZES:
        for local in (0, 2):
            train(lambda n=n: Made(stacked, a=n, b=n), steps=3, set_to_none=False, local=local)
            train(
                lambda n=n: Made(added, a=n, b=n, c=(n // 4, 4)),
                steps=3,
                set_to_none=False,
                local=local,
            )


class Kept(torch.autograd.Function):
    """Gives an alias of a tensor that it keeps."""

    @staticmethod
    def forward(ctx, p, kept):
        ctx.kept = kept
        return (p * kept).sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.kept.detach(), None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", SIZES)
@on_ranks(2)
def test_a_referenced_gradient_gets_the_result(size, shared):
    """Unless its memory belongs to another tensor, too."""
    net, kept, others = nn.Linear(size, 1), [], []
    if shared:
        net.weight.register_hook(lambda g: others.append(g.detach()))
    node = net.weight.expand_as(net.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: kept.append(net.weight.grad))
    wrapped = DistributedDataParallel(net)  # whose hook is called after that one
    for step in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, size), number(step))).sum().backward()
        assert (kept.pop() is net.weight.grad) == (not shared)
        assert (net.weight.grad == (dist.get_world_size() + 1) / 2 + step).all()
        assert all((other == number(i)).all() for i, other in enumerate(others))


@on_ranks(2)
def test_tensors_kept_by_an_autograd_function_do_not_change():
    for n in SIZES:
        keep = [torch.full((n,), number())]
        net = DistributedDataParallel(Made(lambda m, x, keep=keep: Kept.apply(m.a, keep[0]), a=n))
        for _ in range(2):
            net.zero_grad()
            net(number()).backward()
            assert keep[0].unique().tolist() == [number()]
            assert net.module.a.grad.unique().tolist() == [1.5]


class Nothing(torch.autograd.Function):
    """Uses a parameter, and gives it no gradient."""

    @staticmethod
    def forward(ctx, h, p):
        return h + p.sum() * 0

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("where", ["on one rank", "everywhere"])
@on_ranks(2)
def test_a_function_that_gives_no_gradient_for_a_parameter(where):
    """It counts as zeros, also where none of the parameters gets one."""

    def forward(m, x):
        if where == "on one rank" and dist.get_rank() == 0:
            return (m.a * x).sum() + m.b.sum()
        return Nothing.apply(m.b.sum(), m.a)

    def nothing(m, x):
        return Nothing.apply(x, m.a)

    for n in SIZES:
        train(lambda n=n: Made(forward, a=n, b=3))
    net = DistributedDataParallel(Made(nothing, a=5))
    for _ in range(2):
        net(torch.ones(5, requires_grad=True)).sum().backward()
        assert net.module.a.grad.tolist() == [0.0] * 5


@on_ranks(2)
def test_pytorchs_hook_on_complex_buckets():
    """On Gloo its future holds pairs of reals."""
    for n in SIZES[:3]:
        train(
            lambda n=n: Made(lambda m, x: m.complex_a * x, complex_a=n // 2),
            hook=default_hooks.allreduce_hook,
        )


@pytest.mark.narrow({"each_backend": "shm"})  # whose memory a child would share
@on_ranks(2)
def test_gradients_in_a_forked_process():
    """It may clear those that it inherited without clearing ours."""
    net = DistributedDataParallel(Made(lambda m, x: m.a * x, a=20_000))
    for _ in range(2):
        net.zero_grad()
        net(number()).sum().backward()
    if (child := os.fork()) == 0:
        net.module.a.grad.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    assert net.module.a.grad.unique().tolist() == [1.5]
