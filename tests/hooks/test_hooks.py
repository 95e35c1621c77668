"""Gradwire's and PyTorch's hooks in gradwire's DistributedDataParallel."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp.common import in_one_process, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

from gradwire import hooks
from gradwire._torch import PYTHON_BACKENDS
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import HookError
from gradwire.testing import FakeBucket, run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def train(net, steps=3):
    """Return the gradients of each step, and the means over ranks."""
    for step in range(steps):

        def program(net, rank, _, step=step):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            net(x).square().mean().backward()

        net.zero_grad()
        program(net, dist.get_rank(), step)
        means = in_one_process(program, net.module, step, dist.get_world_size())
        yield [p.grad.clone() for p in net.parameters()], means


def assert_trains(net, rtol):
    for got, want in train(net):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


def returns_work(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True)


def returns_tensor(state, bucket):
    dist.all_reduce(bucket.buffer())
    return bucket.buffer() / dist.get_world_size()


def returns_list(state, bucket):
    return [returns_tensor(state, bucket)]


class CallableHook:
    def __call__(self, state, bucket):
        return hooks.all_reduce(None, bucket)


def replaces_buffer(state, bucket):
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


EXACT = {
    "ours": hooks.all_reduce,
    "torch": default_hooks.allreduce_hook,
    "partial": partial(hooks.all_reduce),
    "callable": CallableHook(),
    "work": returns_work,
    "tensor": returns_tensor,
    "list": returns_list,
    "set_buffer": replaces_buffer,
}
LOSSY = {
    "fp16": hooks.fp16,
    "bf16": hooks.bf16,
    "torch_fp16": default_hooks.fp16_compress_hook,
    "torch_bf16": default_hooks.bf16_compress_hook,
    "torch_fp16_wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "torch_bf16_wrapper": default_hooks.bf16_compress_wrapper(hooks.all_reduce),
    "compressed_torch": hooks.compress(default_hooks.allreduce_hook, torch.bfloat16),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap", [None, 1e-4])
@pytest.mark.parametrize("name", EXACT)
@on_ranks(2)
def test_averaging_hooks(name, cap, view):
    net = DistributedDataParallel(mlp(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    net.register_comm_hook(None, EXACT[name])
    assert_trains(net, 1e-5)


@pytest.mark.parametrize("name", LOSSY)
@on_ranks(2)
def test_rounding_hooks(name):
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
    net.register_comm_hook(dist.group.WORLD, LOSSY[name])
    assert_trains(net, 2e-2)


@pytest.mark.parametrize("start", [0, 2])
def test_power_sgd_with_many_buckets_does_not_hang(start):
    """Two collectives chained in callbacks for each bucket (torch's DDP hangs here on Gloo)."""

    def main():
        net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=16,
            start_powerSGD_iter=2 + start,
            min_compression_rate=0,
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        steps = []
        for got, want in train(net, steps=8):
            steps.append([g.tolist() for g in got])
            if len(steps) <= 2:  # not yet compressing
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b)
        return len(net.reducer.buckets), steps

    (buckets, first), (_, second) = run_ranks(main, 2, timeout=60)
    assert buckets >= 3
    assert first == second


@pytest.mark.skipif(PYTHON_BACKENDS, reason="this torch's hooks read Gloo's results")
@on_ranks(2)
def test_a_stock_hook_that_cannot_read_gloos_results_is_reported():
    """The quantization hooks expect the result of NCCL's all_gather; Gloo's has another format."""
    net = DistributedDataParallel(mlp())
    net.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    with pytest.raises(HookError, match="quantize_and_allgather"):
        next(train(net))


def test_a_hook_receives_gradients_accumulated_under_no_sync():
    def main():
        net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        seen = []

        def looking(state, bucket):
            seen.append((bucket.buffer().item(), bucket.is_last(), len(bucket.gradients())))
            return hooks.all_reduce(None, bucket)

        net.register_comm_hook(None, looking)
        x = torch.tensor([[1.0 + dist.get_rank()]])
        with net.no_sync():
            net(x).sum().backward()
        net(x).sum().backward()
        return seen, net.module.weight.grad.item()

    assert run_ranks(main, 2) == [([(2.0, True, 1)], 3.0), ([(4.0, True, 1)], 3.0)]


def test_complex_gradients_compress_as_pairs_of_reals():
    def inner(state, bucket):
        assert bucket.buffer().dtype == torch.bfloat16
        assert [tuple(g.shape) for g in bucket.gradients()] == [(2, 2)]
        return bucket.buffer() * 2

    gradient = torch.tensor([1 + 2j, 3 - 4j])
    result = hooks.compress(inner, torch.bfloat16)(None, FakeBucket(gradient)).wait()
    assert torch.equal(result, gradient * 2)
