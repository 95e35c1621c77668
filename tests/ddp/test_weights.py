"""Weighted averages: the gradient of the mean over all samples, however they are divided."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp import naive
from ddp.common import on_ranks
from gradwire import collectives as C
from gradwire import compat, hooks
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    ReductionError,
)
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Net(nn.Module):
    """Parameters of all kinds of buckets; the loss uses one of them without the forward."""

    def __init__(self, sparse=False, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 6, sparse=sparse)
        self.first = nn.Linear(6, 1024)
        self.large = nn.Linear(1024, 1030)
        self.wide = nn.Linear(1030, 2, dtype=torch.float64)
        self.rotation = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.sometimes = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, words, *, extra=False):
        x = self.embedding(words)
        hidden = self.first(x).tanh()
        if self.reentrant is not None:
            hidden = checkpoint(self.large, hidden, use_reentrant=self.reentrant)
        else:
            hidden = self.large(hidden)
        out = self.wide(hidden.double()) * self.rotation.abs()
        return out + self.sometimes(x) if extra else out


def loss_of(net, words, extra=True):
    inner = getattr(net, "module", net)
    penalty = inner.first.bias.square().sum() if len(words) else 0
    return net(words, extra=extra).square().mean() + penalty


def batches(steps, micro):
    """Words of each backward of each step; ranks and backwards differ in how many."""
    torch.manual_seed(10 + dist.get_rank())
    return [
        [
            torch.randint(5, (1 + (3 * step + 2 * i + 4 * dist.get_rank()) % 7,))
            for i in range(micro)
        ]
        for step in range(steps)
    ]


def assert_same(ours, twin, rtol=1e-4):
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            got, want = p.grad.to_dense(), q.grad.to_dense()
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol / 100, msg=name)


def train(net, *, steps=2, micro=1, none=True, rtol=1e-4, extra=lambda step: True):
    """Each step held against the naive twin, and against one process with the whole batch."""
    twin = copy.deepcopy(net.module)
    for number, step in enumerate(batches(steps, micro)):
        net.zero_grad(set_to_none=none)
        twin.zero_grad(set_to_none=none)
        for i, words in enumerate(step):
            if i + 1 < len(step):
                with net.no_sync():
                    net.weight(len(words))
                    loss_of(net, words, extra(number)).backward()
            else:
                net.weight(len(words))
                loss_of(net, words, extra(number)).backward()
            (loss_of(twin, words, extra(number)) * len(words)).backward()
        if net.require_manual_backward_finalization:
            net.finalize_backward()
        group = dist.group.WORLD
        for p in twin.parameters():  # a rank that does not use one takes part
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        naive.weighted_average(group, twin.parameters(), sum(map(len, step)))
        assert_same(net, twin, rtol)


def always(step):
    return True


def one_rank(step):
    return dist.get_rank() == step % 2


UNUSED = {"find_unused_parameters": True}
CASES = {  # options, hook, which ranks use a layer, arguments of the model
    "view": ({"gradient_as_bucket_view": True}, None, always, {}),
    "lazy": ({"bucket_cap_mb": 1e-3, "lazy_bucket_allocation": True}, None, always, {}),
    "unused": (UNUSED, None, one_rank, {}),
    "unused-hook": (UNUSED, "all_reduce", one_rank, {}),
    "skip": ({**UNUSED, "skip_all_reduce_unused_params": True}, "all_reduce", always, {}),
    "static": ({"static_graph": True}, None, always, {}),
    "sparse": ({}, None, always, {"sparse": True}),
    "sparse-hook": ({}, "all_reduce", always, {"sparse": True}),
    "reentrant": ({}, None, always, {"reentrant": True}),
    "checkpoint": ({}, None, always, {"reentrant": False}),
    "zeros": ({}, None, always, {}),
    "finalize": ({}, None, always, {}),
    "smaller": ({}, "bf16", always, {}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_the_mean_over_samples(case):
    options, hook, extra, model = CASES[case]
    net = DistributedDataParallel(Net(**model), **options)
    net.register_comm_hook(None, hook)
    net.require_manual_backward_finalization = case == "finalize"
    rtol = 0.05 if case == "smaller" else 1e-4
    for micro in (1, 3):
        train(net, micro=micro, none=case != "zeros", extra=extra, rtol=rtol)


def linear(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)


def rows(count, value=1.0):
    return torch.full((count, 2), value)


def backward(net, weight, x):
    if weight is not None:
        net.weight(weight)
    net(x).mean().backward()
    return net.module.weight.grad


@pytest.mark.parametrize("hook", [None, hooks.all_reduce, "fp16"])
@on_ranks(2)
def test_ranks_of_weight_zero(hook):
    net = linear()
    net.register_comm_hook(None, hook)
    own = dist.get_rank()  # rank 0 has no samples: its mean is NaN
    assert backward(net, own, rows(own)).tolist() == [[1.0, 1.0]]
    net.zero_grad()
    assert backward(net, 0, rows(0)).tolist() == [[0.0, 0.0]]  # nobody has any
    net.zero_grad()
    assert backward(net, 0.25, rows(1)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("weight", [None, 2])
@pytest.mark.parametrize("hook", [None, hooks.all_reduce, "fp16"])
@on_ranks(2)
def test_how_many_messages_weights_need(hook, weight):
    net = linear()
    net.register_comm_hook(None, hook)
    ends = []
    for _ in range(4):  # the second step begins with the buckets' order
        backward(net, weight, rows(1))
        net.zero_grad()
        ends.append(net.reducer.end)
    sent = [after - before for before, after in itertools.pairwise(ends)]
    assert sent[1:] == [3 if hook == "fp16" and weight else 1] * 2


@on_ranks(2)
def test_weights_that_come_after_a_hooks_first_backward():
    """Nothing is sent for them by then: the error comes before anything is."""
    net = linear()
    net.register_comm_hook(None, "fp16")
    backward(net, None, rows(1))
    with pytest.raises(NotSupportedError, match="if there was one in the hook's first backward"):
        net.weight(2)
    net.register_comm_hook(None, "fp16")
    net.zero_grad()
    assert backward(net, 1 + dist.get_rank(), rows(1, 3.0)).tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("hook", [None, hooks.all_reduce, "fp16"])
@on_ranks(2)
def test_ranks_that_disagree_whether_there_are_weights(hook):
    net = linear()
    net.register_comm_hook(None, hook)
    for with_weight in (0, 1):
        weight = 0 if dist.get_rank() == with_weight else None
        with pytest.raises(MismatchError, match=r"1 ranks called weight\(n\).*1 did not"):
            backward(net, weight, rows(1))
        net.zero_grad()
        assert backward(net, 3, rows(1)).tolist() == [[1.0, 1.0]]
        net.zero_grad()


@pytest.mark.parametrize("forgetful", [(0, 1), (1,)])
@on_ranks(2)
def test_a_weight_that_is_forgotten_after_others(forgetful):
    net = linear()
    rank = dist.get_rank()
    with net.no_sync():
        backward(net, 2, rows(1))
    error = ReductionError if rank in forgetful else PeerFailedError
    with pytest.raises(error, match="no weight was given"):
        backward(net, None if rank in forgetful else 1, rows(1))
    net.zero_grad()
    assert backward(net, 3, rows(1)).tolist() == [[1.0, 1.0]]


@on_ranks(2)
def test_gradients_that_were_reduced_or_unweighted_before():
    net = linear()
    backward(net, 2, rows(1))
    with pytest.raises(NotSupportedError, match="zero_grad"):
        backward(net, 2, rows(1))
    net.zero_grad()
    with net.no_sync():
        backward(net, None, rows(1))
    with pytest.raises(NotSupportedError, match="zero_grad"):
        backward(net, 2, rows(1))
    net.zero_grad()
    assert backward(net, 3, rows(1)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("none", [False, True])
@on_ranks(2)
def test_abandoned_accumulation(none):
    """What was cleared does not count, what was zero by itself does."""
    net = linear()
    rank = dist.get_rank()
    with net.no_sync():
        backward(net, 100, rows(1))
    net.zero_grad(set_to_none=none)
    with net.no_sync():
        backward(net, 3, rows(1, 0.0))
    assert backward(net, 1, rows(1, 4.0 * rank)).tolist() == [[0.5, 0.5]]  # 4 of 8 samples


def test_two_backwards_of_one_forward_count_once():
    def main():
        net = linear()
        with net.no_sync():
            net.weight(1 + dist.get_rank())
            out = net(rows(1))
            out.sum().backward(retain_graph=True)
            out.sum().backward()
        return backward(net, 1, rows(1, 3.0))[0, 0].item()

    # (1 * 2 + 2 * 2 + 3 + 3) / (1 + 2 + 1 + 1)
    assert run_ranks(main, 2) == pytest.approx([12 / 5] * 2)


@pytest.mark.parametrize("hook", [None, "fp16"])
def test_weights_with_join(hook):
    def main():
        net = linear()
        net.register_comm_hook(None, hook)
        rank, found = dist.get_rank(), []
        for by_initial in (False, True):
            with net.join(divide_by_initial_world_size=by_initial):
                for step in range(1 + rank):
                    net.zero_grad()
                    found += backward(net, 1 + 2 * rank, rows(1, 1.0 + rank + step)).tolist()[0][:1]
        return found

    assert run_ranks(main, 2) == [[1.75, 1.75], [1.75, 3.0, 1.75, 3.0]]


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (-1, ArgumentError),
        (math.nan, ArgumentError),
        (math.inf, ArgumentError),
        ("3", ArgumentTypeError),
        (True, ArgumentTypeError),
        (torch.tensor(3.0), ArgumentTypeError),
    ],
)
@on_ranks(2)
def test_invalid_weights(weight, error):
    net = linear()
    with pytest.raises(error, match="weight is"):
        net.weight(weight)
    assert backward(net, None, rows(1)).tolist() == [[1.0, 1.0]]


@on_ranks(2)
def test_unsupported_uses_of_weights():
    half = DistributedDataParallel(nn.Linear(2, 1, dtype=torch.bfloat16))
    skipping = linear(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for net in (half, skipping):
        with pytest.raises(NotSupportedError, match="register_comm_hook"):
            net.weight(2)
        net.register_comm_hook(None, "all_reduce")
        net.weight(2)
    net = linear()
    net.weight(2)
    with pytest.raises(NotSupportedError, match=r"torch\.autograd\.grad"):
        net(rows(1)).sum().backward(create_graph=True)


def test_under_compat_the_wrapper_has_no_weight():
    """Programs initialize every module that has one."""

    def main():
        with compat.installed():
            net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
            assert not hasattr(net, "weight")
            net.reducer.weight(1 + 2 * dist.get_rank())
            net(rows(1, 1.0 + dist.get_rank())).sum().backward()
            return net.module.weight.grad.tolist()

    assert run_ranks(main, 2) == [[[1.75, 1.75]]] * 2


class Now(nn.Module):
    """Uses its parameter now and then."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, x, *, use):
        return self.linear(x) if use else x.sum(1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_samples_of_a_forward_that_uses_no_parameter_count(grad, after):
    net = DistributedDataParallel(Now(), find_unused_parameters=True)
    found = []
    for _ in range(2):
        net.zero_grad()
        for use in (False, True):
            with net.no_sync(enabled=not use):
                if not after:
                    net.weight(3)
                out = net(rows(3).requires_grad_(grad), use=use)
                if after and (grad or use):
                    net.weight(3)
                if out.requires_grad:
                    out.mean().backward()
        found += net.module.linear.weight.grad.tolist()
    half = [[0.5, 0.5]] * 2 if grad or not after else [[1.0, 1.0]] * 2
    assert found == half


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_forwards_that_are_computed_again_share_a_weight(reentrant):
    """A checkpoint runs the module within the backward that has used its weight."""
    net = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    x = rows(1).requires_grad_()
    with net.no_sync():
        net.weight(1 + dist.get_rank())
        sum(checkpoint(net, x, use_reentrant=reentrant) for _ in range(2)).sum().backward()
    net.weight(1)
    net(x).sum().backward()
    assert net.module.weight.grad.tolist() == [[pytest.approx(1.6)] * 2] * 2


@pytest.mark.narrow({"each_backend": "gloo"})
@on_ranks(2)
def test_a_model_of_large_parameters_only():
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(1024, 1030, bias=False))
    for _ in range(2):
        net.zero_grad()
        n = dist.get_rank() + 1.0
        net.weight(n)
        (net(torch.full((1, 1024), n)).sum()).backward()
    assert net.module.weight.grad[0, 0].item() == pytest.approx((1 * 1 + 2 * 2) / 3)


class Exchanging(nn.Module):
    """Cotangents pass to other ranks within the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), SyncBatchNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def gathered(out):
    everyones = C.all_gather(out, sizes="find")
    return (everyones.tanh() @ out.t()).square().mean()


def alone(out):
    return out.square().mean()


@pytest.mark.parametrize("loss", [alone, gathered])
@on_ranks(2)
def test_weights_where_ranks_exchange_cotangents(loss):
    net = DistributedDataParallel(Exchanging())
    twin = copy.deepcopy(net.module)
    for step in range(3):
        count = 2 + 3 * ((dist.get_rank() + step) % 2)
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(step + 9 * count))
        net.zero_grad()
        twin.zero_grad()
        net.weight(count)
        loss(net(x)).backward()
        (loss(twin(x)) * count).backward()
        naive.weighted_average(dist.group.WORLD, twin.parameters(), count)
        assert_same(net.module, twin)


@on_ranks(2)
def test_a_weight_of_0_where_ranks_exchange_cotangents():
    net, plain = DistributedDataParallel(Exchanging()), nn.BatchNorm1d(4)
    whole = torch.randn(4, 3)
    whole = C.broadcast(whole, 0)
    own = whole[: 4 * dist.get_rank()]  # none on rank 0
    net.weight(len(own))
    net(own).square().mean().backward()
    twin = nn.Sequential(copy.deepcopy(net.module.first), plain)
    out = copy.deepcopy(net.module.last)
    twin.zero_grad()
    out(twin(whole).tanh()).square().mean().backward()
    torch.testing.assert_close(net.module.first.weight.grad, twin[0].weight.grad)
    net.zero_grad()
    net.weight(4 * dist.get_rank())
    outputs = net(whole)
    error = PeerFailedError if dist.get_rank() else NotSupportedError
    with pytest.raises(error, match=r"weight\(0\)"):
        outputs.square().mean().backward()


@on_ranks(2)
def test_a_weight_ends_with_a_backward_that_raised():
    """Also at the output, before a gradient that counts the weight."""
    net, rank = linear(), dist.get_rank()
    for weight in (None, 1 + rank):  # without one in the next step, and with another one
        net.zero_grad()
        net.weight(2 + rank)
        output = net(rows(1))
        if rank == 0:
            output.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 0 else PeerFailedError):
            output.sum().backward()
        net.zero_grad()
        want = (1 + 2) / 2 if weight is None else (1 * 1 + 2 * 2) / 3
        assert backward(net, weight, rows(1, 1.0 + rank)).tolist() == [[pytest.approx(want)] * 2]
