"""The unit of a hook's state does not depend on the weights of steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.hooks.hosts import _make
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Delayed(hooks.StatefulHook):
    """A user's hook that sends the rest of the previous step."""

    def __init__(self):
        super().__init__(None)
        self.kept = {}

    def run_hook(self, bucket):
        own = bucket.buffer() / dist.get_world_size()
        self.kept[bucket.index()], last = own, self.kept.get(bucket.index(), torch.zeros_like(own))
        return dist.all_reduce(last.clone(), async_op=True)


def clip(bucket):
    bucket.buffer().clamp_(-1, 1)


def across_hosts():
    groups = _make(dist.group.WORLD, [[0], [1]], None, None)
    return None, hooks.across_hosts(hooks.BlockQuantization(4, block=8), groups)


def power_sgd():
    state = power.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    return state, power.powerSGD_hook


HOOKS = {
    "int4": lambda: (None, hooks.BlockQuantization(4, block=8)),
    "int8": lambda: (None, hooks.BlockQuantization(8, block=8, start=2)),
    "across_hosts": across_hosts,
    "power": power_sgd,
    "user": lambda: (None, Delayed()),
    "clip": lambda: (None, hooks.wrap(hooks.all_reduce, before=clip)),
    "fp16": lambda: (None, "fp16"),
    "fp16_int4": lambda: (
        None,
        hooks.compress(hooks.BlockQuantization(4, block=8), torch.float16),
    ),
}
LINEAR = {
    "bf16": lambda: (None, "bf16"),
    "torch_allreduce": lambda: (None, default_hooks.allreduce_hook),
}
WEIGHTS = [(1000, 10), (10, 70_000), (None, None), (0.5, 3), (0, 7), (1000, 1000), (1, 2)]
"""Weights of the ranks in each step."""


def train(hook, *, weighted):
    """Return reduced gradients of steps with weights, applied by gradwire or by hand."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    net.register_comm_hook(*hook())
    rank, found = dist.get_rank(), []
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))
    for weights in WEIGHTS:
        net.zero_grad()
        loss = (net(torch.eye(8)) * target).sum()
        if weights[0] is not None and weighted:
            net.weight(weights[rank])
        elif weights[0] is not None:
            loss = loss * weights[rank] * 2 / sum(weights)
        loss.backward()
        found.append(net.module.weight.grad.clone())
    return found


@pytest.mark.parametrize("names", [HOOKS, LINEAR], ids=["kept", "linear"])
@on_ranks(2)
def test_weights_do_not_scale_a_hooks_state(names):
    wrong = []
    for name, hook in names.items():
        pairs = zip(train(hook, weighted=True), train(hook, weighted=False), strict=True)
        eps = 1e-2 if name == "bf16" else 1e-4
        if not all(torch.allclose(a, b, rtol=10 * eps, atol=eps) for a, b in pairs):
            wrong.append(name)
    assert wrong == []


class Halving(hooks.StatefulHook):
    """A user's hook that keeps half of each gradient for the next step."""

    def __init__(self):
        super().__init__(None)
        self.kept = 0

    def run_hook(self, bucket):
        half = (bucket.buffer() + self.kept) / 2
        self.kept = half.clone()
        return dist.all_reduce(half / dist.get_world_size(), async_op=True)


def test_ranks_that_leave_join_do_not_scale_a_hooks_state():
    """Rank 0 has one batch, half of which is delayed and arrives unscaled in the second step."""

    def main():
        net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        net.register_comm_hook(None, Halving())
        found = []
        with net.join(divide_by_initial_world_size=False):
            for _ in range(1 + dist.get_rank()):
                net.zero_grad()
                net(torch.tensor([[4.0]])).sum().backward()
                found.append(net.module.weight.grad.item())
        return found

    # both keep 2; rank 1 then sends half of 4 × 2 / 1 + 2, rank 0 half of 2
    assert run_ranks(main, 2) == [[2.0], [2.0, 3.0]]
