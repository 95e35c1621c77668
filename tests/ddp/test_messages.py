"""A step sends no more messages than with PyTorch's class."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.common import on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("each_backend")


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.embedding(x.long().abs()))


class TwoSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Sparse(), nn.Embedding(50, 4, sparse=True)

    def forward(self, x):
        return self.first(x) + self.second(x.long().abs())


def mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def with_buffers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def with_buffers_of_three_dtypes():
    net = with_buffers()
    net.register_buffer("small", torch.ones(3, dtype=torch.float16))
    return net


def messages(net):
    """Return the number of collectives in a step after the first ones."""
    group = dist.group.WORLD
    for _ in range(5):
        before = group._get_sequence_number_for_group()
        net.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
    return group._get_sequence_number_for_group() - before


@pytest.mark.parametrize(
    ("model", "options", "hook", "of_torch"),
    [
        (mlp, {}, None, None),
        (mlp, {"bucket_cap_mb": 1e-5}, None, None),
        (mlp, {"gradient_as_bucket_view": True}, None, None),
        (mlp, {"static_graph": True}, None, None),
        (mlp, {"find_unused_parameters": True}, None, None),
        (with_buffers, {}, None, None),
        (with_buffers, {"broadcast_buffers": False}, None, None),
        (with_buffers_of_three_dtypes, {}, None, None),
        (with_buffers_of_three_dtypes, {"find_unused_parameters": True}, None, None),
        (Sparse, {}, None, None),
        (TwoSparse, {}, None, None),
        (TwoSparse, {"find_unused_parameters": True}, None, None),
        (TwoSparse, {}, default_hooks.allreduce_hook, default_hooks.allreduce_hook),
        *(
            (mlp, options, hook, of_torch)
            for options in ({}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-5})
            for hook, of_torch in (
                (hooks.all_reduce, default_hooks.allreduce_hook),
                (hooks.fp16, default_hooks.fp16_compress_hook),
                (hooks.bf16, default_hooks.fp16_compress_hook),
                (default_hooks.allreduce_hook, default_hooks.allreduce_hook),
                (default_hooks.fp16_compress_hook, default_hooks.fp16_compress_hook),
            )
        ),
    ],
)
@on_ranks(2)
def test_a_step_sends_no_more_than_with_pytorch(model, options, hook, of_torch):
    ours = DistributedDataParallel(model(), **options)
    theirs = nn.parallel.DistributedDataParallel(model(), **options)
    if hook is not None:
        ours.register_comm_hook(None, hook)
        theirs.register_comm_hook(None, of_torch)
    expected = messages(theirs)
    assert expected > 0
    assert messages(ours) <= expected
