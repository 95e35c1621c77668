"""Backwards whose forward did not go through the wrapper, and backwards within its forward."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import assert_gradients, in_one_process, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    NotSupportedError,
    ReductionError,
)
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Net(nn.Module):
    """A body with two heads, of which `loss` uses both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.never = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h), self.other(h)

    def loss(self, x):
        return sum(y.square().sum() for y in self(x))


def batch(rank, step):
    return torch.full((2, 4), (rank + 1.0 + step) / 5)


def through(net, x):
    return sum(y.square().sum() for y in net(x))


# -- on all ranks: functions of a wrapper, a rank and a step ---------------------------------------


def all_around(net, rank, step):
    net.module.loss(batch(rank, step)).backward()


def a_submodule(net, rank, step):
    net.module.head(net.module.body(batch(rank, step))).sum().backward()


def other_layers_on_each_rank(net, rank, step):
    h = net.module.body(batch(rank, step))
    (net.module.head, net.module.other)[(rank + step) % 2](h).sum().backward()


def a_parameter(net, rank, step):
    (net.module.head.weight * (rank + step + 1)).sum().backward()


def part_after_a_reduced_one(net, rank, step):
    through(net, batch(rank, step)).backward()
    net.module.body(batch(rank, step + 1)).sum().backward()


def before_a_reduced_one(net, rank, step):
    net.module.body(batch(rank, step + 1)).sum().backward()
    through(net, batch(rank, step)).backward()


def twice(net, rank, step):
    loss = net.module.loss(batch(rank, step))
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated_in_another_part(net, rank, step):
    with net.no_sync():
        loss = through(net, batch(rank, step))
    loss.backward()  # still local
    net.module.body(batch(rank, step + 1)).sum().backward()


def checkpoints(net, rank, step):
    x = batch(rank, step).requires_grad_()
    h = checkpoint(net.module.body, x, use_reentrant=True)
    checkpoint(net.module.head, h, use_reentrant=True).sum().backward()


def beside_autograd_grad(net, rank, step):
    loss = net.module.loss(batch(rank, step))
    if rank == 0:
        torch.autograd.grad(loss, [*net.module.body.parameters()], retain_graph=True)
    loss.backward()


def a_penalty(net, rank, step):
    x = batch(rank, step).requires_grad_()
    loss = net.module.loss(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def for_some_parameters(net, rank, step):
    net.module.loss(batch(rank, step)).backward(inputs=[*net.module.body.parameters()])


def of_two_losses(net, rank, step):
    x = batch(rank, step)
    torch.autograd.backward([net.module.loss(x), net.module.body(x).sum()])


def after_a_forward_in_no_sync(net, rank, step):
    with net.no_sync():
        loss = net.module.loss(batch(rank, step))
    loss.backward()


def in_evaluation(net, rank, step):
    net.eval()
    all_around(net, rank, step)
    net.train()


def in_a_thread(net, rank, step):
    thread = threading.Thread(target=all_around, args=(net, rank, step))
    thread.start()
    thread.join()


def after_a_forward_without_a_backward(net, rank, step):
    net(batch(rank, step))
    net.module.loss(batch(rank, step)).backward()


def after_a_local_one_of_one_rank(net, rank, step):
    if rank == 0:
        with net.no_sync():
            all_around(net, rank, step)
        net.zero_grad()
    through(net, batch(rank, step)).backward()


def compiled(net, rank, step):
    through(torch.compile(net.module, backend="aot_eager"), batch(rank, step)).backward()


PROGRAMS = [
    *(all_around, a_submodule, other_layers_on_each_rank, a_parameter, part_after_a_reduced_one),
    *(before_a_reduced_one, twice, accumulated_in_another_part, checkpoints, beside_autograd_grad),
    *(a_penalty, for_some_parameters, of_two_losses, after_a_forward_in_no_sync, in_evaluation),
    *(in_a_thread, after_a_forward_without_a_backward, after_a_local_one_of_one_rank, compiled),
]
"""The fuzzer's routes have more of the common ones."""
STATIC = [all_around, a_submodule, twice]  # the first backward decides what is used


OPTIONS = [
    ({}, None),
    ({"find_unused_parameters": True}, None),
    ({"bucket_cap_mb": 0, "gradient_as_bucket_view": True}, None),
    ({}, "all_reduce"),
    ({"find_unused_parameters": True}, "all_reduce"),
    ({"static_graph": True}, None),
]


def run(programs, options, hook, ranks=2):
    """Run each program for some steps with a wrapper of its own."""
    failed = {}
    for program in programs:
        net = DistributedDataParallel(Net(), **options)
        net.register_comm_hook(None, hook)
        try:
            for step in range(3):
                expected = in_one_process(program, net.module, step, ranks)
                net.zero_grad()
                program(net, dist.get_rank(), step)
                assert_gradients(net, expected)
        except Exception as error:
            failed[str(program)] = f"step {step}: {type(error).__name__}: {error}"[:300]
            if isinstance(error, DistributedError):
                break
    return failed


@pytest.mark.parametrize(("options", "hook"), OPTIONS)
def test_gradients_are_those_of_one_process(options, hook):
    programs = STATIC if "static_graph" in options else PROGRAMS
    for failed in run_ranks(run, 2, args=(programs, options, hook)):
        assert not failed


class Twice(nn.Linear):
    """A layer in two checkpoints."""

    def forward(self, x):
        return sum(checkpoint(super(Twice, self).forward, x, use_reentrant=True) for _ in range(2))


@on_ranks(2)
def test_a_static_graph_of_which_a_part_is_run():
    net = DistributedDataParallel(Twice(4, 1), static_graph=True)
    for _ in range(2):
        net.zero_grad()
        net(batch(dist.get_rank(), 0).requires_grad_()).sum().backward()
        assert net.module.weight.grad.tolist() == [pytest.approx([1.2] * 4)]
    with pytest.raises(ReductionError, match=r"got fewer gradients .*, rank \d at .*:\d+"):
        (net.module.weight * batch(0, 0)).sum().backward()


@on_ranks(2)
def test_two_wrappers_and_a_loss_around_them():
    nets = [DistributedDataParallel(Net()) for _ in range(2)]
    for step in range(3):
        expected = [in_one_process(all_around, net.module, step, 2) for net in nets]
        for net in nets:
            net.zero_grad()
        sum(net.module.loss(batch(dist.get_rank(), step)) for net in nets).backward()
        for net, want in zip(nets, expected, strict=True):
            assert_gradients(net, want)


@on_ranks(2)
def test_parameters_that_were_added_are_noticed():
    net = DistributedDataParallel(Net())
    net.module.never.requires_grad_(True)
    with pytest.raises(ArgumentError, match="never"):
        all_around(net, 0, 0)


@on_ranks(2)
def test_what_cannot_be_agreed_on():
    net = DistributedDataParallel(Net().bfloat16())
    with pytest.raises(NotSupportedError, match=r"no bucket of float32 .* rank \d at .*:\d+"):
        net.module.body(batch(0, 0).bfloat16()).sum().backward()
    net.register_comm_hook(None, "all_reduce")
    net.zero_grad()
    net.module.body(batch(dist.get_rank(), 0).bfloat16()).sum().backward()
    assert net.module.head.weight.grad is None
    net = DistributedDataParallel(Net())
    net.register_comm_hook(None, "bf16")
    through(net, batch(0, 0)).backward()
    for _ in range(2):
        with pytest.raises(NotSupportedError, match=r"with this communication hook"):
            net.weight(1)
        with pytest.raises(NotSupportedError, match=r"with this .* again .* rank \d at .*:\d+"):
            all_around(net, 0, 0)
        through(net, batch(0, 0)).backward()
    net.register_comm_hook(None, "bf16")
    for step, loss in enumerate([net.module.loss, partial(through, net), net.module.loss]):
        expected = in_one_process(all_around, net.module, step, 2)
        net.zero_grad()
        loss(batch(dist.get_rank(), step)).backward()
        torch.testing.assert_close(net.module.body.weight.grad, expected[1], rtol=0.02, atol=0.02)
    net = DistributedDataParallel(Net())
    with pytest.raises(NotSupportedError, match=r"in join\(\)"), net.join():
        all_around(net, 0, 0)


# -- on one rank alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [None, "all_reduce"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("program", [all_around, a_submodule])
@on_ranks(3)
def test_a_backward_around_on_one_rank(program, options, hook):
    """All ranks learn which rank ran it, and where; the next step works."""
    net = DistributedDataParallel(Net(), **options)
    net.register_comm_hook(None, hook)
    rank = dist.get_rank()
    through(net, batch(rank, 0)).backward()
    run = program if rank == 1 else lambda net, *at: through(net, batch(*at)).backward()
    with pytest.raises(MismatchError, match=rf"only \(rank 1 at {__file__}:\d+\): call"):
        run(net, rank, 1)
    expected = in_one_process(all_around, net.module, 2, 3)
    net.zero_grad()
    through(net, batch(rank, 2)).backward()
    assert_gradients(net, expected)


@on_ranks(2)
def test_one_rank_that_waits_in_vain():
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = DistributedDataParallel(Net(), process_group=group)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match=rf"rank 0 at {__file__}:\d+: "):
            all_around(net, 0, 0)
    dist.barrier()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("unequal", ["more", "skipped", "local"])
@on_ranks(2)
def test_ranks_with_unequal_numbers_of_backwards(unequal, buffers):
    """Gradients of two steps meet without an error, which ends when a rank calls the wrapper."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=2))
    module = Net()
    if buffers:
        module.register_buffer("code", torch.ones(3))
    net = DistributedDataParallel(module, process_group=group)
    other = 5 if unequal == "more" else 2
    met = in_one_process(
        lambda n, r, _: n.module.loss(batch(r, 1 if r else other)).backward(), net.module, 1, 2
    )

    def train():
        for step in range(3):
            net.zero_grad()
            if rank == 0 and step == 1 and unequal == "more":
                all_around(net, 0, other)
            elif rank == 0 and step == 1:
                with net.no_sync():
                    all_around(net, 0, 1) if unequal == "local" else None
                continue
            all_around(net, rank, step)
            if rank == 1 and step == 1:
                assert_gradients(net, met)
        through(net, batch(rank, 3)).backward()

    with pytest.raises(DistributedError if buffers else MismatchError):
        train()
    dist.barrier()


# -- within a forward -----------------------------------------------------------------------------


class InnerLoop(nn.Module):
    """A forward that runs a backward on some ranks, and keeps its gradients or not."""

    def __init__(self, ranks, *, keeps):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.ranks, self.keeps = ranks, keeps

    def forward(self, x, rank):
        if rank in self.ranks:
            before = [p.grad for p in self.body.parameters()]
            self.body.zero_grad()
            with torch.enable_grad():
                self.body(x.detach()).square().sum().backward()
            local = torch.linalg.vector_norm(self.body.weight.grad)
            if not self.keeps:
                for p, kept in zip(self.body.parameters(), before, strict=True):
                    p.grad = kept
            x = x + local
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@pytest.mark.parametrize(("options", "hook"), [*OPTIONS[:2], OPTIONS[3], OPTIONS[5]])
def test_a_backward_within_forward(ranks, keeps, options, hook, same_as_one_process):
    """Its gradients are this rank's own, until the backward of the output reduces what is left."""

    def program(net, rank, step):
        if rank == 1 and not keeps:
            with torch.no_grad():
                net(batch(rank, step), rank)
        with net.no_sync():
            net(batch(rank, step + 5), rank).sum().backward()
        net(batch(rank, step), rank).square().sum().backward()

    model = partial(InnerLoop, ranks, keeps=keeps)
    same_as_one_process(program, 2, options, hook, model=model)


class Adds(nn.Linear):
    """A forward that adds to its own gradients if told."""

    def forward(self, x, adds):
        if adds:
            super().forward(x).sum().backward()
        return super().forward(x)


@on_ranks(2)
def test_weights_and_a_backward_within_forward():
    """The weight is that of the output's gradients; mixed with others, they would be wrong."""
    rank, net = dist.get_rank(), DistributedDataParallel(InnerLoop([0, 1], keeps=False))
    plain = copy.deepcopy(net.module)
    for step in range(4):
        for r in range(2):
            out = plain(batch(r, step), r)
            ((r + step + 1) * out.square().sum() / 20).backward()
            if r == rank:
                with net.no_sync(enabled=step < 3):
                    net.weight(r + step + 1)
                    own = net(batch(r, step), r)
                    torch.testing.assert_close(own, out)
                    own.square().sum().backward()
    for p, q in zip(net.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad * 20 / 24)
    net = DistributedDataParallel(InnerLoop([0, 1], keeps=True))
    net.weight(2)
    loss = net(batch(rank, 0), rank).sum()
    with pytest.raises(NotSupportedError, match="got no weight"):
        loss.backward()
    net = DistributedDataParallel(Adds(4, 2))
    net.weight(2)
    with net.no_sync():
        net(batch(rank, 0), False).sum().backward()
    with pytest.raises(ReductionError, match=r"clear \.grad before a backward within forward"):
        net(batch(rank, 0), True)
