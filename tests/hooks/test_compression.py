"""Compressing hooks among ranks: nothing is lost, all ranks agree, and a run can be resumed."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ddp.common import assert_same_on_ranks, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError, DistributedError
from gradwire.hooks import host_groups
from gradwire.hooks.hosts import _make
from gradwire.testing import FakeBucket, run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

HOOKS = {
    "int8": lambda **o: hooks.BlockQuantization(8, block=64, **o),
    "int4": lambda **o: hooks.BlockQuantization(4, block=64, **o),
    "stochastic": lambda **o: hooks.BlockQuantization(4, block=64, stochastic=True, **o),
}
each_hook = pytest.mark.parametrize("name", HOOKS)


class Net(nn.Module):
    """Matrices, a convolution in channels_last, biases, and a branch that is used in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 16)
        self.rare = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, rare=False):
        x = torch.tanh(self.conv(x)).flatten(2).mean(2) * self.scale
        x = self.second(torch.tanh(self.first(x)))
        return self.rare(x) if rare else x


def data(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 5, 5, generator=generator)


def wrapped(hook, **options):
    net = DistributedDataParallel(Net(), bucket_cap_mb=0.001, **options)
    net.register_comm_hook(None, hook)
    return net


def train(net, steps, rare=lambda step: True):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        net(data(step), rare=rare(step)).square().mean().backward()
        optimizer.step()
    return parameters(net)


def parameters(net):
    return [p.detach().clone() for p in net.module.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def mean_over_ranks(tensor):
    total = tensor.clone().double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def result_of(hook, bucket):
    result = hook.run_hook(bucket)
    hook.committed()
    return (result if isinstance(result, torch.Tensor) else result.wait()).clone()


@pytest.mark.narrow({"world": 2, "name": "int8"})
@pytest.mark.parametrize("world", [2, 4])
@each_hook
def test_results_plus_errors_are_the_gradients(name, world):
    """The mean over ranks of all gradients is the sum of all results plus the mean error."""

    def main():
        @given(
            shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
            seed=st.integers(0, 1000),
            dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
        )
        @settings(derandomize=True, database=None, deadline=None, max_examples=12)
        def conserves(shapes, seed, dtype):
            hook = HOOKS[name]()
            generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
            given_, got = 0, 0
            for _ in range(3):
                made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
                bucket = FakeBucket(*made, names=[str(i) for i in range(len(shapes))])
                given_ = given_ + as_doubles(bucket.buffer())
                got = got + as_doubles(result_of(hook, bucket))
            kept = hook.state.errors.state_dict().values()
            kept = torch.cat([*kept]).double() if kept else torch.zeros_like(got)
            torch.testing.assert_close(
                got + mean_over_ranks(kept), mean_over_ranks(given_), rtol=1e-5, atol=1e-5
            )

        conserves()

    run_ranks(main, world)


def as_doubles(tensor):
    tensor = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    return tensor.double().clone()


@pytest.mark.narrow({"world": 2, "name": "int4"}, {"world": 1, "name": "int8"})
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@each_hook
def test_all_ranks_have_the_same_bits(name, world):
    """Buckets rebuilt, branches unused, no_sync, uneven inputs."""

    def main():
        net = wrapped(HOOKS[name](), find_unused_parameters=True)
        train(net, range(4), rare=lambda step: step % 2 == 0)
        train(net, range(4, 6), rare=lambda step: (step + dist.get_rank()) % 2 == 0)
        with net.no_sync():
            net(data(6), rare=True).square().mean().backward()
        net(data(7), rare=True).square().mean().backward()
        with net.join():
            train(net, range(8, 9 + dist.get_rank()))
        assert len(net.reducer.buckets) > 2 or dist.get_world_size() == 1
        trained = train(net, range(20, 22))
        assert all(p.isfinite().all() for p in trained)
        assert_same_on_ranks(trained)

    run_ranks(main, world)


@pytest.mark.narrow({"name": "stochastic"})
@each_hook
@on_ranks(3)
def test_a_resumed_run_continues_bit_for_bit(name):
    net = wrapped(HOOKS[name]())
    train(net, range(3))
    file = io.BytesIO()
    torch.save([net.state_dict(), net.comm_hook_state_dict()], file)
    want = train(net, range(3, 6))
    file.seek(0)
    model, hook = torch.load(file, weights_only=True)
    net = wrapped(HOOKS[name]())
    net.load_state_dict(model)
    net.load_comm_hook_state_dict(hook)
    assert same(train(net, range(3, 6)), want)

    net = wrapped(HOOKS[name]())  # without its state the result differs
    net.load_state_dict(model)
    assert not same(train(net, range(3, 6)), want)
    again = copy.deepcopy(net)  # with the buckets of the first backward
    train(again, range(1))
    assert again.reducer.comm_hook.state.step == net.reducer.comm_hook.state.step + 1


@pytest.mark.narrow({"name": "int8", "bad": float("inf")})
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_hook
@on_ranks(2)
def test_nonfinite_gradients_arrive_and_do_not_change_the_state(name, bad):
    hook = HOOKS[name]()

    def step(value=None):
        torch.manual_seed(dist.get_rank())
        gradient = torch.randn(12, 16)
        if value is not None and dist.get_rank() == 1:
            gradient[3, 4] = value
        bucket = FakeBucket(gradient, torch.randn(5), names=["w", "b"])
        return result_of(hook, bucket)

    step()
    before = copy.deepcopy(hook.state.state_dict())
    result = step(bad)
    assert not result.isfinite().all()
    after = hook.state.state_dict()
    for key, tensor in before["errors"].items():
        assert torch.equal(tensor, after["errors"][key])
    assert step().isfinite().all()
    assert_same_on_ranks([result.nan_to_num(7.0)])


@pytest.mark.narrow({"name": "int4"})
@each_hook
@on_ranks(2)
def test_mixed_dtypes_sparse_and_accumulated_gradients(name):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(9, 6, sparse=True)
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6).double()
            self.complex = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

        def forward(self, ids):
            x = self.two(self.one(self.embedding(ids)).double())
            return (x.to(torch.complex64) @ self.complex).abs()

    net = DistributedDataParallel(Mixed(), bucket_cap_mb=1e-4)
    net.register_comm_hook(None, HOOKS[name]())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.tensor([step, dist.get_rank()])).sum().backward()
        optimizer.step()
    assert net.module.embedding.weight.grad.is_sparse
    low = wrapped(hooks.compress(HOOKS[name](), torch.bfloat16))
    train(low, range(2))
    assert_same_on_ranks([*net.parameters(), *low.parameters()])


@on_ranks(2)
def test_steps_before_start_are_not_compressed():
    plain, late = wrapped(None), wrapped(hooks.BlockQuantization(4, start=2))
    assert same(train(plain, range(2)), train(late, range(2)))
    assert not same(train(plain, range(2, 3)), train(late, range(2, 3)))


@on_ranks(2)
def test_a_failed_step_counts_on_no_rank():
    """Rank 1 fails at the first bucket, when rank 0 may have sent its last one."""
    hook = hooks.BlockQuantization(4, start=2)
    net = wrapped(hook)
    train(net, range(1))
    inner = hook.run_hook

    def failing(bucket):
        if dist.get_rank() == 1:
            raise KeyError("out of luck")
        return inner(bucket)

    hook.run_hook = failing
    with pytest.raises(DistributedError):
        train(net, range(1, 2))
    hook.run_hook = inner
    assert hook.state.step == 1
    assert_same_on_ranks(train(net, range(1, 5)))


# -- across hosts


TEAMS = {"2 + 2": [[0, 1], [2, 3]], "1 + 3": [[0], [1, 2, 3]], "one": [[0, 1, 2]]}


@pytest.mark.narrow({"name": "int8", "layout": "1 + 3"})
@pytest.mark.parametrize("layout", TEAMS)
@pytest.mark.parametrize("name", ["plain", "int8"])
def test_across_hosts(name, layout):
    def main():
        groups = _make(dist.group.WORLD, TEAMS[layout], None, None)
        hook = hooks.all_reduce if name == "plain" else HOOKS[name]()
        hook = hooks.across_hosts(hook, groups)
        net, twin = wrapped(hook), wrapped(None)
        for model in (net, twin):
            model(data(0), rare=True).square().mean().backward()
        exact = name == "plain" or layout == "one"
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            if exact:
                torch.testing.assert_close(p.grad, q.grad)
        if name != "plain":  # the inner hook runs between hosts only
            ran = bool(hook.hook.state.errors.state_dict())
            assert ran == (groups.between is not None and layout != "one")
        train(net, range(1, 4))
        saved, weights = net.comm_hook_state_dict(), copy.deepcopy(net.state_dict())
        want = train(net, range(4, 6))
        if name != "plain":
            again = wrapped(hooks.across_hosts(HOOKS[name](), groups))
            train(again, range(3))
            again.load_state_dict(weights)
            again.load_comm_hook_state_dict(saved)
            assert all(map(torch.equal, train(again, range(4, 6)), want))
        assert len(copy.deepcopy(net).module.state_dict()) == len(net.module.state_dict())
        assert_same_on_ranks(want)

    run_ranks(main, sum(map(len, TEAMS[layout])))


@pytest.mark.parametrize("layout", ["2 + 2", "one"])
def test_float16_means_across_hosts_do_not_overflow(layout):
    def main():
        groups = _make(dist.group.WORLD, TEAMS[layout], None, None)
        net = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
        net.register_comm_hook(None, hooks.across_hosts(hooks.all_reduce, groups))
        net(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
        return net.module.weight.grad.item()

    assert set(run_ranks(main, sum(map(len, TEAMS[layout])))) <= {40000.0, 39968.0, 40032.0}


@on_ranks(1)
def test_across_hosts_refuses_a_hook_with_a_group():
    groups = host_groups()
    with pytest.raises(ArgumentError, match="construct it without a group"):
        hooks.across_hosts(hooks.BlockQuantization(group=dist.group.WORLD), groups)
    inner = hooks.bind_hook(dist.group.WORLD, hooks.all_reduce)
    with pytest.raises(ArgumentError, match="no process_group"):
        hooks.across_hosts(inner, groups)
