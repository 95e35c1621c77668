"""broadcast_coalesced equals one broadcast a tensor, for all shapes, dtypes, strides and roots."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
import torch.distributed as dist

from ddp import naive
from ddp.common import on_ranks
from gradwire.ddp import broadcast_coalesced
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random_tensors(seed: int, rank: int) -> list[torch.Tensor]:
    """The same shapes and dtypes on every rank; values and strides of its own."""
    shared, own = random.Random(seed), random.Random(seed * 31 + rank)
    torch.manual_seed(seed * 31 + rank)
    tensors = []
    for _ in range(shared.randrange(1, 30)):
        shape = [shared.choice([0, 1, 2, 3, 40]) for _ in range(shared.randrange(4))]
        dtype = shared.choice(DTYPES)
        order = list(range(len(shape)))
        own.shuffle(order)
        t = torch.empty([shape[d] for d in order], dtype=dtype)
        t = t.permute([order.index(d) for d in range(len(shape))])
        t.copy_(torch.randint(0, 2, shape) + rank if dtype != torch.bool else rank == 0)
        if own.random() < 0.2 and t.dim():
            t = torch.stack([t, t], dim=-1)[..., 0]
        if t.is_complex() and own.random() < 0.5:
            t = t.conj()
        tensors.append(t)
    return tensors


def like_naive(world_size, in_place_bytes, message_bytes):
    module = importlib.import_module("gradwire.ddp.broadcast")
    group, rank = dist.group.WORLD, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:  # the process is kept for other tests
        patch.setattr(module, "IN_PLACE_BYTES", in_place_bytes)
        patch.setattr(module, "MESSAGE_BYTES", message_bytes)
        for seed in range(12):
            src = seed % world_size
            ours, expected = random_tensors(seed, rank), random_tensors(seed, rank)
            broadcast_coalesced(group, ours, [100, 5000, 1 << 20][seed % 3], group_src=src)
            naive.broadcast(group, expected, src)
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("in_place", "message"), [(64, 100), (1 << 20, 32 << 20)])
def test_equals_the_naive_twin(world_size, in_place, message):
    run_ranks(like_naive, world_size, args=(world_size, in_place, message))


def test_roots_by_global_and_by_group_rank():
    def main():
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            with pytest.raises(ArgumentError, match="does not contain this rank"):
                broadcast_coalesced(group, [torch.zeros(1)])
            return None
        results = []
        for root in ({}, {"src": 2}, {"group_src": 1}):
            t = torch.full((3,), float(dist.get_rank()))
            broadcast_coalesced(group, [t], **root)
            results.append(t[0].item())
        return results

    assert run_ranks(main, 3) == [None, [1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]


def test_parameters_and_version_counters():
    def main():
        small = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
        large = torch.nn.Parameter(torch.full((1 << 18,), float(dist.get_rank())))
        versions = small._version, large._version
        broadcast_coalesced(dist.group.WORLD, [small, large], src=1)
        changed = small._version > versions[0], large._version > versions[1]
        return changed, small.unique().tolist(), large.unique().tolist()

    assert run_ranks(main, 2) == [((True, True), [1.0], [1.0]), ((False, False), [1.0], [1.0])]


@on_ranks(2)
def test_buffers_beside_parameters_need_no_gradient():
    """A batch norm's running mean that required one would fail in its next forward."""
    net = torch.nn.BatchNorm1d(3)
    broadcast_coalesced(dist.group.WORLD, [*net.parameters(), net.running_mean])
    assert (net.weight.requires_grad, net.running_mean.requires_grad, net.weight.is_leaf) == (
        True,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"buffer_size": 0}, ArgumentError, "buffer_size is 0"),
        ({"src": 7}, ArgumentError, "src is global rank 7"),
        ({"group_src": 7}, ArgumentError, "group_src is 7"),
        ({"src": 0, "group_src": 0}, ArgumentError, "both given"),
        ({"group": None}, ArgumentTypeError, "group is None"),
        ({"tensors": [3]}, ArgumentTypeError, r"tensors\[0\] is a int"),
        ({"tensors": [torch.eye(2).to_sparse()]}, ArgumentError, "sparse_coo"),
        ({"tensors": [torch.ones(1).expand(4)]}, ArgumentError, r"shape \(4,\), is expanded"),
    ],
)
@on_ranks(1)
def test_bad_arguments(arguments, kind, message):
    given = {"group": dist.group.WORLD, "tensors": [torch.zeros(1)], **arguments}
    with pytest.raises(kind, match=message):
        broadcast_coalesced(**given)
