"""Uneven inputs: ranks with different numbers of batches."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.common import assert_same_on_ranks, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm
from gradwire.errors import (
    DistributedError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    ReductionError,
)
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 300), nn.Linear(300, 2))


def batch(rank, step):
    return torch.full((2, 4), 1.0 + rank + 10 * step) / 20


def steps_of(rank):
    return 2 + 2 * rank


def reference(world_size, *, initial):
    """One process: the sum over ranks that have input, divided by W or by their number."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    for step in range(steps_of(world_size - 1)):
        optimizer.zero_grad()
        active = [r for r in range(world_size) if step < steps_of(r)]
        losses = [net(batch(r, step)).square().mean() for r in active]
        (sum(losses) / (world_size if initial else len(active))).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train(net, **options):
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    with net.join(**options):
        for step in range(steps_of(rank)):
            optimizer.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in net.module.parameters()]


HOOKS = {"none": None, "ours": hooks.all_reduce, "torch": default_hooks.allreduce_hook}


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_with_uneven_inputs(world_size, hook, initial):
    """PyTorch's DDP ignores divide_by_initial_world_size where there is a hook."""

    def main():
        net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-3)
        if HOOKS[hook] is not None:
            net.register_comm_hook(None, HOOKS[hook])
        got = train(net, divide_by_initial_world_size=initial)
        for p, want in zip(got, reference(world_size, initial=initial), strict=True):
            torch.testing.assert_close(p, want)

    run_ranks(main, world_size)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"lazy_bucket_allocation": True},
    ],
)
@on_ranks(2)
def test_uneven_inputs_with_other_options(options):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.unused, self.norm = mlp(), nn.Linear(2, 2), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(self.net(x) + torch.arange(2.0)[:, None])

    options.setdefault("find_unused_parameters", True)
    net = DistributedDataParallel(Wide(), bucket_cap_mb=1e-6, **options)
    got = train(net)
    for p in got:
        root = p.clone()
        dist.broadcast(root, 0)
        assert torch.equal(p, root)
    assert net.module.unused.weight.grad is None


@on_ranks(2)
def test_accumulation_and_ranks_without_any_input():
    rank = dist.get_rank()
    net, twin = DistributedDataParallel(mlp()), mlp()
    with net.join(divide_by_initial_world_size=False):
        for step in range(4 * rank):
            if step % 2 == 0:
                net.zero_grad()
                with net.no_sync():
                    net(batch(rank, step)).square().mean().backward()
            else:
                net(batch(rank, step)).square().mean().backward()
                twin.zero_grad()
                for x in (batch(rank, step - 1), batch(rank, step)):
                    twin(x).square().mean().backward()
                for p, q in zip(net.module.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad)


@on_ranks(2)
def test_early_termination_and_no_join():
    net = DistributedDataParallel(mlp())
    with pytest.raises(RuntimeError, match="exhausted"):  # PyTorch's context raises it
        train(net, throw_on_early_termination=True)
    twin = copy.deepcopy(net)
    with twin.join(enable=False):
        twin(batch(0, 0)).sum().backward()


def no_backward(net, x):
    net(x)
    net(x).sum().backward()


def no_backward_at_all(net, x):
    net(x)


def evaluated_before_its_backward(net, x):
    output = net(x)
    with torch.no_grad():
        net(x)
    output.sum().backward()


NO_BACKWARD = [no_backward, no_backward_at_all, evaluated_before_its_backward]


@pytest.mark.parametrize("step", NO_BACKWARD)
def test_ranks_without_input_wait_for_a_backward(step):
    """On Gloo, the process was aborted: messages of other sizes met."""

    def main():
        rank = dist.get_rank()
        net = DistributedDataParallel(mlp())
        for _ in range(2):  # before a rank has run out, a step may be as it likes
            step(net, batch(rank, 0))

        def train():
            with net.join():
                for number in range(2 * bool(rank)):
                    step(net, batch(rank, number))

        with pytest.raises(DistributedError, match="had no backward") as raised:
            train()
        with net.join():  # the ranks go on
            for number in range(1 + bool(rank)):
                net(batch(rank, number)).sum().backward()
        return type(raised.value)

    first, *others = run_ranks(main, 3)
    assert first is PeerFailedError
    assert ReductionError in others  # one may hear of the other's before it has its own


@on_ranks(2)
def test_ranks_without_input_take_part_in_one_module_after_the_other():
    """The next one's message met the buckets of the first."""
    rank = dist.get_rank()
    first, second = DistributedDataParallel(mlp()), DistributedDataParallel(nn.Linear(2, 1))

    def train():
        with Join([first, second]):
            for number in range(1 + bool(rank)):
                second(first(batch(rank, number))).sum().backward()

    with pytest.raises(DistributedError, match="had no backward"):
        train()
    with Join([first, second]):
        for number in range(1 + bool(rank)):
            output = first(batch(rank, number))
            output.sum().backward()
            second(output.detach()).sum().backward()


@on_ranks(3)
def test_ranks_without_input_do_not_wait_for_a_second_backward():
    """The message of the next step met its bucket."""
    rank = dist.get_rank()
    net, x = DistributedDataParallel(mlp()), batch(rank, 0)
    with net.join():
        for step in range(2 * bool(rank)):
            output = net(x)
            output[0].sum().backward(retain_graph=True)
            if step == 0:
                with pytest.raises(ReductionError, match="a second backward of one forward"):
                    output[1].sum().backward()
            net.zero_grad()
        if rank:
            net(x).sum().backward()
            twin = mlp()
            twin(torch.cat([batch(1, 0), batch(2, 0)])).sum().div(3).backward()
            for p, q in zip(net.module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("after_forward", [True, False])
@on_ranks(3)
def test_ranks_without_input_call_the_buffer_hook(after_forward):
    """On shm the others got a MismatchError; on Gloo the process was aborted."""

    def average(buffers, group):
        for buffer in buffers.values():
            dist.all_reduce(buffer.div_(group.size()), group=group)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            self.count += len(x)
            return self.layer(x)

    rank = dist.get_rank()
    net = DistributedDataParallel(Counted())
    net.register_buffer_hook(average, after_forward=after_forward)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with net.join():
        for number in range(2 + 2 * rank):
            with net.no_sync():
                net(batch(rank, number)).sum().backward()
            net(batch(rank, number)).sum().backward()
            optimizer.step()
    assert_same_on_ranks([net.module.count, *net.parameters()])


@pytest.mark.parametrize("kind", [SyncBatchNorm, nn.SyncBatchNorm])
@on_ranks(3)
def test_layers_that_wait_for_ranks_without_input(kind):
    rank, layer = dist.get_rank(), kind(4)
    net = DistributedDataParallel(nn.Sequential(layer, mlp()))
    layer.eval()
    train(net)

    def wait():
        with net.join():
            for number in range(1 + rank):
                layer.train(number > 0)  # PyTorch's layer would raise on the CPU
                net(batch(rank, number)).sum().backward()

    with pytest.raises(NotSupportedError, match=r"SyncBatchNorm.*throw_on_early_termination=True"):
        wait()


@pytest.mark.parametrize("under", [torch.no_grad, None])
@on_ranks(3)
def test_ranks_with_input_that_do_not_do_the_same(under):
    """On Gloo, the process was aborted: messages of other sizes met."""
    rank = dist.get_rank()
    net = DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(2)))

    def train():
        with net.join():
            for number in range(2 + rank):
                with (under or net.no_sync)() if rank == 1 and number == 1 else nullcontext():
                    output = net(batch(rank, number))
                if output.requires_grad:
                    output.sum().backward()

    with pytest.raises(MismatchError, match="of the 3 ranks that still have input expect"):
        train()
