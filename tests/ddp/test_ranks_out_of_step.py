"""Ranks in different steps, and replicas that are no longer equal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import assert_same_on_ranks, mlp, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenGroupError,
    DistributedError,
    MismatchError,
    NotSupportedError,
)

pytestmark = pytest.mark.usefixtures("each_backend")


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.full((2, 4), 1.0 + rank + 10 * step) / 20


def train(net, steps, *, skipped):
    """Leave the backward of one step out on rank 1, as for a loss that is NaN."""
    for step in range(steps):
        loss = net(batch(step)).square().mean()
        if dist.get_rank() == 1 and step == skipped:
            loss = loss * math.nan
        if not loss.isfinite():
            continue
        loss.backward()


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("hook", [None, hooks.all_reduce])
@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(3)
def test_a_rank_that_skips_a_backward(options, hook):
    """Its next gradients are those of another step than the others'."""
    net = DistributedDataParallel(mlp(), **options)
    net.register_comm_hook(None, hook)
    with pytest.raises(MismatchError, match=r"rank 0: 0; rank 1: 1; rank 2: 0\. Call backward"):
        train(net, 5, skipped=2)
    net.zero_grad()
    train(net, 2, skipped=None)  # the ranks go on together
    assert_same_on_ranks([p.grad for p in net.parameters()])


@pytest.mark.parametrize("each_backend", ["shm"], indirect=True)
@on_ranks(3)
def test_a_rank_that_skips_a_backward_before_buffers_are_sent(each_backend):
    """It sends buffers while the others send gradients. Afterwards no rank waits for another."""
    net = DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(2)))
    with pytest.raises(MismatchError, match="different collectives"):
        train(net, 3, skipped=1)
    with pytest.raises(BrokenGroupError, match="different collectives"):
        net(batch(3))


# -- programs with more forwards on some ranks, which train as they are meant ---------------------


def loss_of(net, rank, step, i=0):
    return net(batch(step + i, rank)).square().mean()


def on_rank_1(program):
    """Let the other ranks take a plain step."""

    def run(net, rank, step):
        (program if rank == 1 else plain)(net, rank, step)

    return run


def plain(net, rank, step):
    loss_of(net, rank, step).backward()


@on_rank_1
def logged(net, rank, step):
    with torch.no_grad():
        loss_of(net, rank, step)
    with net.no_sync():
        loss_of(net, rank, step)
    plain(net, rank, step)


@on_rank_1
def looked_at(net, rank, step):
    loss_of(net, rank, step)
    plain(net, rank, step)


@on_rank_1
def between(net, rank, step):
    loss = loss_of(net, rank, step)
    loss_of(net, rank, step)  # after the forward of the step, and before its backward
    loss.backward()


@on_rank_1
def second_first(net, rank, step):
    first, second = loss_of(net, rank, step), loss_of(net, rank, step, 1)
    (second + first).backward()


@on_rank_1
def for_the_input(net, rank, step):
    x = batch(step, rank).requires_grad_()
    torch.autograd.grad(net(x).sum(), x)
    plain(net, rank, step)


def in_a_list(net, rank, step):
    """Every loss is kept with its graph."""
    net.__dict__.setdefault("kept", []).append(loss_of(net, rank, step))
    net.kept[-1].backward()


def kept_for_a_while(net, rank, step):
    """Rank 0 lets go of an output between a later forward and its backward."""
    if step % 3 == 1 and rank == 0:
        net.kept = [net(batch(step, rank))]
    loss = loss_of(net, rank, step)
    if step % 3 == 2:
        net.kept = []
    loss.backward()


def hardest_so_far(net, rank, step):
    """Each rank trains on the candidate whose loss is the largest, and keeps only that one."""
    worst = None
    for i in range(4):
        loss = loss_of(net, rank, step, (3 * i + step) % 4)
        if worst is None or loss > worst:
            worst = loss
    worst.backward()


def uneven_evaluation(net, rank, step):
    """In eval mode, with gradients enabled."""
    net.eval()
    for i in range(2 * rank):
        loss_of(net, rank, step, i).item()
    net.train()
    plain(net, rank, step)


def sharpness_aware(net, rank, step):
    """Each rank climbs by its own gradient, then takes the mean of those found there."""
    with net.no_sync():
        loss_of(net, rank, step).backward()
    with torch.no_grad():
        before = [p.clone() for p in net.parameters()]
        for p in net.parameters():
            p.add_(p.grad, alpha=0.1)
    net.zero_grad()
    plain(net, rank, step)
    with torch.no_grad():
        for p, old in zip(net.parameters(), before, strict=True):
            p.copy_(old)


def accumulated(net, rank, step):
    """Micro batches under no_sync, of which ranks have different numbers."""
    with net.no_sync():
        for i in range(rank + 1):
            loss = loss_of(net, rank, step, i)
            if i != 1:
                loss.backward()
    plain(net, rank, step)


PROGRAMS = [
    *(logged, looked_at, between, second_first, for_the_input, in_a_list, kept_for_a_while),
    *(hardest_so_far, uneven_evaluation, sharpness_aware, accumulated),
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_different_forwards_on_some_ranks(program, options, same_as_one_process):
    same_as_one_process(program, options={"check_replicas": 1, **options}, model=mlp, steps=8)


@on_ranks(3)
def test_all_ranks_skip_a_batch_that_one_of_them_skips():
    rank = dist.get_rank()
    net, taken = DistributedDataParallel(mlp()), []
    for step in range(6):
        flag = step == rank + 1
        loss = net(batch(step)).sum()
        if not net.skip_if_any(torch.tensor(flag) if step % 2 else flag):
            loss.backward()
            taken.append(step)
    with pytest.raises(ArgumentTypeError, match="flag is 1"):
        net.skip_if_any(1)

    def uneven():
        with net.join():
            for step in range(1 + rank):
                loss = net(batch(step)).sum()
                if step:
                    net.skip_if_any(False)
                loss.backward()

    with pytest.raises((DistributedError, NotSupportedError), match="run out of input"):
        uneven()
    assert taken == [0, 4, 5]


@pytest.mark.narrow({"options": {}}, {"hook": None, "weighted": True})
@pytest.mark.parametrize("hook", [None, hooks.all_reduce])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("after", [True, False])
@on_ranks(2)
def test_a_last_batch_that_is_skipped(after, weighted, options, hook):
    """What accumulated before is reduced. If all batches were skipped, nothing is sent."""
    rank = dist.get_rank()
    net, twin = DistributedDataParallel(mlp(), **options), mlp()
    net.register_comm_hook(None, hook)
    for step, skipped in enumerate([(2,), (), (0, 1, 2), (1, 2), (0,), (2,)]):
        net.zero_grad()
        twin.zero_grad()
        total = torch.zeros(())
        for i in range(3):
            x, weight = batch(3 * step + i), 1.0 + rank * i if weighted else 1.0
            with net.no_sync(enabled=i < 2):
                if weighted:
                    net.weight(weight)
                loss = net(x).square().mean() if after or i not in skipped else None
                if not net.skip_if_any(i in skipped and rank == step % 2):
                    loss.backward()
                    (weight * twin(x).square().mean()).backward()
                    total += weight
        dist.all_reduce(total)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            if q.grad is not None:
                dist.all_reduce(q.grad.div_(total if weighted else 2))
            assert (p.grad is None) == (q.grad is None)
            torch.testing.assert_close(p.grad, q.grad)


# -- replicas that drift -------------------------------------------------------------------


def steps(net, number, optimizer=None):
    for step in range(number):
        net.zero_grad()
        net(batch(step)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()


def write(net, name):
    with torch.no_grad():
        dict(net.module.named_parameters())[name].view(-1)[-1] += 1e-3


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@on_ranks(3)
def test_a_parameter_changed_on_one_rank(name):
    net = DistributedDataParallel(mlp(), check_replicas=3)
    steps(net, 4)
    if dist.get_rank() == 2:
        write(net, name)
    steps(net, 2)
    drift = rf"first rank 0: {name}: digest (\w+); rank 1: {name}: digest \1; rank 2: {name}: "
    with pytest.raises(MismatchError, match=f"replicas after step 6 differ, {drift}"):
        steps(net, 2)
    net.refit()
    steps(net, 4)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(50, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.embedding((100 * x[:, :1]).long() % 50))


def skips_a_step(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if dist.get_rank() == 0:
        optimizer.step = lambda: None
    steps(net, 120, optimizer)


def normalizes(net):
    steps(net, 120)


@pytest.mark.parametrize(
    ("make", "train", "first"),
    [(mlp, skips_a_step, "0.weight"), (Embedded, normalizes, "embedding.weight")],
)
@on_ranks(2)
def test_replicas_are_compared_every_hundred_steps(make, train, first):
    net = DistributedDataParallel(make())
    with pytest.raises(MismatchError, match=f"replicas after step 100 differ, first .*{first}"):
        train(net)
    train(DistributedDataParallel(make(), check_replicas=0))


@on_ranks(2)
def test_equal_replicas(tmp_path):
    """All dtypes and layouts, NaN, an ignored parameter, and uneven inputs."""

    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 2)
            values = [torch.full((3,), math.nan), torch.randn(700, 3).t(), torch.tensor(1.0)]
            values += [torch.ones(5).to(torch.bfloat16), torch.ones(2, dtype=torch.complex64)]
            values += [torch.arange(3), torch.ones(1).bool(), torch.zeros(0), torch.ones(9)[1:]]
            frozen = (nn.Parameter(v, requires_grad=False) for v in values)
            self.frozen = nn.ParameterList(frozen)
            self.own = nn.Parameter(torch.full((2,), float(dist.get_rank())))
            self._ddp_params_and_buffers_to_ignore = ["own"]

        def forward(self, x):
            return self.layer(x) + self.own.detach()

    net = DistributedDataParallel(Kinds(), check_replicas=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    steps(net, 3, optimizer)
    with net.join():
        steps(net, 1 + dist.get_rank(), optimizer)
    steps(net, 2)
    with torch.no_grad():
        net.module.frozen[0][1] = 0.0 if dist.get_rank() else math.nan
    with pytest.raises(MismatchError, match=r"frozen\.0: digest"):
        steps(net, 2)


def local_only(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("hook", [local_only, hooks.all_reduce])
@on_ranks(2)
def test_hooks_that_allow_replicas_to_differ(hook):
    """Without a number they are not compared: a hook may average over some of the ranks."""
    net = DistributedDataParallel(mlp())
    pairs = [dist.new_group([0]), dist.new_group([1])]
    state = pairs[dist.get_rank()] if hook is hooks.all_reduce else None
    net.register_comm_hook(state, hook)
    steps(net, 120, torch.optim.SGD(net.parameters(), 0.1))


@pytest.mark.parametrize("each_backend", ["shm"], indirect=True)
@on_ranks(1)
def test_invalid_intervals(each_backend):
    for wrong, kind in ((-1, ArgumentError), (1.5, ArgumentTypeError), (True, TypeError)):
        with pytest.raises(kind, match="check_replicas is"):
            DistributedDataParallel(mlp(), check_replicas=wrong)
