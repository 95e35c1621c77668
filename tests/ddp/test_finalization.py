"""Backwards that their caller ends, and buckets that have memory during backward only."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import OneProcess, in_one_process, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.ddp.buckets.bucket import PackedBucket
from gradwire.errors import ReductionError

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def expected(net, inputs):
    """Return the mean over ranks of the gradients of a loss of these inputs."""
    everyones = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, inputs.detach())

    def program(plain, rank, _):
        plain(everyones[rank]).square().sum().backward()

    return in_one_process(program, net.module, 0, len(everyones))


def gradients(net):
    return [p.grad.clone() for p in net.module.parameters()]


# -- manual ----------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"lazy_bucket_allocation": True},
]


@pytest.mark.parametrize("hook", [None, "fp16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_reduced_when_finalized(options, hook, same_as_one_process):
    def program(net, rank, step):
        net.require_manual_backward_finalization = manual = step < 4
        loss = net(batch(step, rank)).square().sum()
        if not isinstance(net, OneProcess):
            assert net.should_finalize_after_backward == (step == 0)
        loss.backward()
        if manual:
            net.finalize_backward()

    near = {"rtol": 1e-2, "atol": 1e-2} if hook else {}
    same_as_one_process(program, 2, options, hook, model=mlp, steps=5, **near)


@on_ranks(2)
def test_backward_returns_before_the_reduction_is_done():
    """The hook's future is completed by what runs between backward and its finalization."""
    pending = []

    def hook(state, bucket):
        future = torch.futures.Future()
        pending.append((future, bucket.buffer()))
        return future

    net = DistributedDataParallel(mlp())
    net.register_comm_hook(None, hook)
    net.require_manual_backward_finalization = True
    net(batch(0)).square().sum().backward()
    assert len(pending) == 1
    for future, buffer in pending:
        future.set_result(torch.full_like(buffer, 7.0))
    net.finalize_backward()
    assert all((g == 7).all() for g in gradients(net))


@on_ranks(2)
def test_a_hook_of_backward_finalizes():
    """The input's gradient comes after all of the parameters': an optimizer steps before it."""
    net = DistributedDataParallel(mlp())
    net.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []

    def step(_):
        net.finalize_backward()
        seen.append(gradients(net))
        optimizer.step()

    for number in range(4):
        x = batch(number).requires_grad_() * 1  # no leaf: those' hooks come at any time
        wanted = expected(net, x.detach())
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        loss = net(x).square().sum()
        if after := net.should_finalize_after_backward:
            loss.backward()
            step(None)
        else:
            x.register_hook(step)
            loss.backward()
        assert after == (number == 0)
        torch.testing.assert_close(seen[number], wanted)
        for p, old, g in zip(net.parameters(), before, wanted, strict=True):
            torch.testing.assert_close(p.detach(), old - 0.1 * g)
    assert len(seen) == 4


@on_ranks(2)
def test_wrong_times_are_errors_and_the_module_goes_on():
    net = DistributedDataParallel(mlp())
    with pytest.raises(ReductionError, match="no reduction to finalize"):
        net.finalize_backward()
    net.require_manual_backward_finalization = True
    assert net.should_finalize_after_backward
    with pytest.raises(ReductionError, match="no reduction to finalize"):
        net.finalize_backward()
    with net.no_sync():
        net(batch(0)).sum().backward()
    with pytest.raises(ReductionError, match="no reduction to finalize"):
        net.finalize_backward()
    net.zero_grad()

    x = batch(0)
    outputs = net(x)
    with pytest.raises(ReductionError, match="no reduction to finalize"):
        net.finalize_backward()
    lacking = []

    def too_soon(gradient):
        with pytest.raises(ReductionError, match=r"0\.weight.*have no gradient yet") as caught:
            net.finalize_backward()
        lacking.append(caught.value.parameters)

    net.module[2].bias.register_post_accumulate_grad_hook(too_soon)
    outputs.square().sum().backward()
    assert lacking
    with pytest.raises(ReductionError, match="during a backward"):
        net.require_manual_backward_finalization = False
    net.finalize_backward()
    torch.testing.assert_close(gradients(net), expected(net, x))
    with pytest.raises(ReductionError, match="no reduction to finalize"):
        net.finalize_backward()


@pytest.mark.parametrize("again", ["forward", "backward"])
@on_ranks(2)
def test_a_backward_that_nobody_finalized_is_an_error_on_all_ranks(again):
    net = DistributedDataParallel(mlp())
    net.require_manual_backward_finalization = True
    x = batch(0)
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    next_call = (lambda: net(x)) if again == "forward" else loss.backward
    with pytest.raises(ReductionError, match="was not finalized"):
        next_call()
    net.zero_grad()
    net(x).square().sum().backward()
    net.finalize_backward()
    torch.testing.assert_close(gradients(net), expected(net, x))


@on_ranks(2)
def test_the_setting_stays_with_a_copy_and_a_new_reducer():
    net = DistributedDataParallel(mlp())
    net.require_manual_backward_finalization = True
    net.refit()
    assert net.require_manual_backward_finalization
    twin = copy.deepcopy(net)
    assert twin.require_manual_backward_finalization
    x = batch(0)
    twin(x).square().sum().backward()
    twin.finalize_backward()
    torch.testing.assert_close(gradients(twin), expected(twin, x))


# -- lazily ----------------------------------------------------------------------------------


def packed(net):
    return [b for b in net.reducer.bucket_set if isinstance(b, PackedBucket)]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", [None, hooks.all_reduce])
@pytest.mark.parametrize("width", [8, 4096])
def test_buckets_have_memory_during_backward_only(width, hook, view, same_as_one_process):
    """Small gradients, which are copied out, and large ones, which lie in the bucket."""
    during, kept = [], []

    def program(net, rank, step):
        if not isinstance(net, OneProcess):
            last = net.module[0].weight  # its gradient is the last but one
            handle = last.register_post_accumulate_grad_hook(
                lambda _: during.append([hasattr(b, "flat") for b in packed(net)])
            )
        net(batch(step, rank)).square().sum().backward()
        if not isinstance(net, OneProcess):
            handle.remove()

    def check(net):
        assert packed(net)
        assert not any(hasattr(b, "flat") for b in packed(net))
        assert all(torch.equal(a, b) for a, b in kept)
        kept.extend((p.grad, p.grad.clone()) for p in net.module.parameters())
        assert hook or width == 8 or any(during[-1])

    options = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": view}
    same_as_one_process(program, 2, options, hook, model=partial(mlp, width), steps=4, check=check)
