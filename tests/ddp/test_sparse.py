"""Sparse gradients: with and without hooks, absent on some ranks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.common import assert_gradients, assert_same_on_ranks, in_one_process, on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import PeerFailedError
from gradwire.testing import run_ranks


class Words(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True, dtype=dtype)
        self.out = nn.Linear(3, 2, dtype=dtype)

    def forward(self, words):
        return self.out(self.words(words))


def check(net, words, *, rtol=1e-5, layout=torch.sparse_coo):
    """Three steps, held against one process with all ranks' words."""
    everyone = [torch.empty_like(words) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, words)

    def program(net, rank, _):
        net(everyone[rank]).square().sum().backward()

    for step in range(3):
        net.zero_grad()
        program(net, dist.get_rank(), step)
        assert net.module.words.weight.grad.layout == layout
        expected = in_one_process(program, net.module, step, len(everyone))
        assert_gradients(net, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@on_ranks(3)
def test_the_mean_of_sparse_gradients(each_backend, dtype):
    rank = dist.get_rank()
    net = DistributedDataParallel(Words(dtype), bucket_cap_mb=1e-5)
    assert ["words.weight"] in net.reducer.buckets
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    check(net, torch.tensor([[rank, 3, rank], [rank + 1, 9, 9]]), rtol=rtol)
    assert_same_on_ranks([net.module.words.weight.grad])


SPARSE_HOOKS = {
    "all_reduce": (hooks.all_reduce, 1e-5),
    "fp16": (hooks.fp16, 1e-2),
    "bf16": (hooks.bf16, 3e-2),
    "compress": (hooks.compress(hooks.all_reduce, torch.float16), 1e-2),
    "wrap": (hooks.wrap(hooks.all_reduce, after=lambda t, _: t * 1.0), 1e-5),
    "torch": (default_hooks.allreduce_hook, 1e-5),
}


@pytest.mark.parametrize("hook", SPARSE_HOOKS)
@on_ranks(2)
def test_sparse_gradients_with_a_hook(each_backend, hook):
    """PyTorch's compressing hooks fail on a sparse bucket; ours, and ours in them, do not."""
    if each_backend == "shm" and hook.startswith("torch"):
        pytest.skip("the hook all_reduces a sparse tensor, which only Gloo does")
    function, rtol = SPARSE_HOOKS[hook]
    net = DistributedDataParallel(Words())
    net.register_comm_hook(None, function)
    check(net, torch.tensor([[dist.get_rank(), 3]]), rtol=rtol)


@on_ranks(2)
def test_an_embedding_that_only_one_rank_uses(each_backend):
    class Sometimes(Words):
        def forward(self, words):
            return self.out(self.words(words) if len(words) else torch.ones(1, 3))

    rank = dist.get_rank()
    net = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    net(torch.tensor([[1]] if rank else [])).sum().backward()
    assert net.module.words.weight.grad.coalesce().indices().tolist() == [[1]]
    net.zero_grad()
    net(torch.tensor([])).sum().backward()
    assert net.module.words.weight.grad is None


@on_ranks(2)
def test_an_embedding_weight_with_a_dense_use(each_backend):
    class Tied(Words):
        def forward(self, words):
            return self.words(words) @ self.words.weight.t() + self.out(self.words(words)).sum()

    net = DistributedDataParallel(Tied())
    rank = dist.get_rank()
    check(net, torch.tensor([[rank, 3, rank]]), layout=torch.strided)


class Large(nn.Module):
    """Two sparse embeddings whose entries do not fit into a first message, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(1500, 40, sparse=True)
        self.second = nn.Embedding(1500, 40, sparse=True)
        self.out = nn.Linear(40, 1, bias=False)
        for parameter in self.parameters():
            parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 7 - 3.0)

    def forward(self, first, second):
        parts = [e(w) for e, w in ((self.first, first), (self.second, second)) if len(w)]
        return self.out(torch.cat(parts)).sum() if parts else self.out(torch.ones(1, 40)).sum()


@on_ranks(2)
def test_a_step_gathers_sparse_gradients_once(each_backend):
    net = DistributedDataParallel(Large())
    numbers = []
    for most in (1000, 1000, 1100, 1100, 5, 1000):
        numbers.append(dist.group.WORLD._get_sequence_number_for_group())
        words = torch.arange(most if dist.get_rank() else 10)
        net.zero_grad()
        net(words, words).backward()
    numbers.append(dist.group.WORLD._get_sequence_number_for_group())
    sent = [b - a for a, b in itertools.pairwise(numbers)]
    assert sent[2:5] == [3, 3, 3], sent  # two gathers and an all_reduce
    assert sent[5] == 5, sent  # more entries than there was room for


@on_ranks(2)
def test_sparse_gradients_after_an_error(each_backend):
    """All ranks agree again on the sizes of messages."""
    rank = dist.get_rank()
    net = DistributedDataParallel(Large())
    many = torch.arange(1000)
    for _ in range(3):
        net(many, many).backward()
    loss = net(many, many)
    if rank:
        loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError if rank else PeerFailedError):
        loss.backward()
    for most in (1400, 3, 1400):
        net.zero_grad()
        words = torch.arange(most)
        net(words, words).backward()
        assert net.module.first.weight.grad._nnz() == most


DTYPES = [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex128, torch.bool]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_sparse_tensors(ranks):
    """Of any dtype, with several sparse dimensions, duplicates and no values."""

    def main():
        shapes = ((40, 30), 2), ((1000, 3, 5), 1), ((70, 50, 2), 2), ((2000,), 1)
        for dtype, (shape, sparse) in itertools.product(DTYPES, shapes):
            total = hooks.SparseSum(dist.group.WORLD)
            for count in (0, 3, 2000, 2, 3000):
                generator = torch.Generator().manual_seed(count)
                own = []
                for rank in range(ranks):
                    n = count if rank == 1 else count // 2
                    indices = torch.stack(
                        [torch.randint(d, (n,), generator=generator) for d in shape[:sparse]]
                    )
                    values = torch.ones(n, *shape[sparse:], dtype=dtype)
                    own.append(torch.sparse_coo_tensor(indices, values, shape))
                total.pack(own[dist.get_rank()])
                total.send().wait()
                if (work := total.send_rest()) is not None:
                    work.wait()
                got = total.result()
                assert got.is_coalesced()
                assert got.dtype == dtype
                dense = [o.to_dense() for o in own]
                assert torch.equal(got.to_dense(), functools.reduce(torch.add, dense))

    run_ranks(main, ranks)
