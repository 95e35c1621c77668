"""Sparse gradients: with and without hooks, absent on some ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import HookError
from gradwire.hooks import GradBucket
from gradwire.testing import run_ranks


class Words(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True, dtype=dtype)
        self.out = nn.Linear(3, 2, dtype=dtype)

    def forward(self, words):
        return self.out(self.words(words))


def check(net, words, *, rtol=1e-5):
    """Three steps, held against one process with all ranks' words."""
    twin = copy.deepcopy(net.module)
    everyone = [torch.empty_like(words) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, words)
    for _ in range(3):
        for model in (net, twin):
            model.zero_grad()
        net(words).square().sum().backward()
        (sum(twin(w).square().sum() for w in everyone) / len(everyone)).backward()
        for p, q in zip(net.module.parameters(), twin.parameters(), strict=True):
            assert p.grad.layout == q.grad.layout
            got, want = p.grad.to_dense(), q.grad.to_dense()
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)
    return net.module.words.weight.grad.to_dense().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mean_of_sparse_gradients(each_backend, dtype):
    def main():
        rank = dist.get_rank()
        net = DistributedDataParallel(Words(dtype), bucket_cap_mb=1e-5)
        assert ["words.weight"] in net.reducer.buckets
        rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
        return check(net, torch.tensor([[rank, 3, rank], [rank + 1, 9, 9]]), rtol=rtol)

    results = run_ranks(main, 3)
    assert results[0] == results[1] == results[2]


SPARSE_HOOKS = {
    "all_reduce": (hooks.all_reduce, 1e-5),
    "fp16": (hooks.fp16, 1e-2),
    "bf16": (hooks.bf16, 3e-2),
    "compress": (hooks.compress(hooks.all_reduce, torch.float16), 1e-2),
    "wrap": (hooks.wrap(hooks.all_reduce, after=lambda t, _: t * 1.0), 1e-5),
    "torch": (default_hooks.allreduce_hook, 1e-5),
}


@pytest.mark.parametrize("hook", SPARSE_HOOKS)
def test_sparse_gradients_with_a_hook(each_backend, hook):
    """PyTorch's compressing hooks fail on a sparse bucket; ours, and ours in them, do not."""
    if each_backend == "shm" and hook.startswith("torch"):
        pytest.skip("the hook all_reduces a sparse tensor, which only Gloo does")

    def main():
        function, rtol = SPARSE_HOOKS[hook]
        net = DistributedDataParallel(Words())
        net.register_comm_hook(None, function)
        check(net, torch.tensor([[dist.get_rank(), 3]]), rtol=rtol)

    run_ranks(main, 2)


def test_torch_s_hook_on_sparse_gradients_in_half_precision(each_backend):
    """Gloo adds no sparse float16 tensors: every rank raises, dense steps go on; shm adds them."""

    def main():
        net = DistributedDataParallel(Words())
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        words = torch.tensor([[dist.get_rank(), 3]])
        if dist.get_backend() == "gloo":
            with pytest.raises(HookError, match=r"bucket of words\.weight"):
                net(words).sum().backward()
        else:
            check(net, words, rtol=1e-2)
        net.register_comm_hook(None, hooks.fp16)
        check(net, words, rtol=1e-2)

    run_ranks(main, 2)


def test_an_embedding_that_only_one_rank_uses(each_backend):
    class Sometimes(Words):
        def forward(self, words):
            return self.out(self.words(words) if len(words) else torch.ones(1, 3))

    def main():
        rank = dist.get_rank()
        net = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
        net(torch.tensor([[1]] if rank else [])).sum().backward()
        assert net.module.words.weight.grad.coalesce().indices().tolist() == [[1]]
        net.zero_grad()
        net(torch.tensor([])).sum().backward()
        assert net.module.words.weight.grad is None

    run_ranks(main, 2)


def test_an_embedding_weight_with_a_dense_use(each_backend):
    class Tied(Words):
        def forward(self, words):
            return self.words(words) @ self.words.weight.t() + self.out(self.words(words)).sum()

    def main():
        net = DistributedDataParallel(Tied())
        rank = dist.get_rank()
        check(net, torch.tensor([[rank, 3, rank]]))

    run_ranks(main, 2)


def test_the_bucket_of_a_sparse_gradient_in_a_hook():
    gradient = torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1), check_invariants=True).coalesce()
    bucket = GradBucket(0, gradient, [torch.zeros(3, 1)], is_last=True)
    assert bucket.gradients()[0] is gradient
    assert bucket.buffer().indices().tolist() == [[1]]
