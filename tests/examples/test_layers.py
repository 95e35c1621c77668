"""Each worked layer equals its twin in one process, in values and gradients.

Every rank also computes the twin on the whole data; its own part of what that gives is what the
layer has to give. The objective is the sum over ranks, so the twin's loss is the whole one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.contrastive import contrastive_loss
from examples.halo_convolution import HaloConv2d
from examples.mixture_of_experts import MixtureOfExperts
from examples.ring_attention import ring_attention
from examples.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from examples.ulysses_attention import ulysses_attention
from torch import Tensor, nn

from gradwire.testing import gradcheck, run_ranks

pytestmark = pytest.mark.timeout(60)
WORLDS = pytest.mark.parametrize("world_size", [2, 4])
F64 = torch.float64


Run = Callable[..., list[Any]]


@pytest.fixture(params=["gloo", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_ranks, backend=request.param)


def data(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def mine(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's part of what the ranks share, a leaf of its own."""
    part = whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return part.clone().requires_grad_(whole.requires_grad)


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs, dtype=F64)


def same(ours: Sequence[Tensor | None], twin: Sequence[Tensor | None]) -> None:
    for mine, whole in zip(ours, twin, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)


def summed(x: Tensor | None) -> Tensor:
    """Over ranks: what data parallelism does to a replicated parameter's gradient."""
    assert x is not None
    total = x.clone()
    dist.all_reduce(total)
    return total


@pytest.mark.narrow({"world_size": 2})
@WORLDS
def test_contrastive_loss(run: Run, world_size: int) -> None:
    def twin(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        own = torch.arange(len(images))
        logits = scale * images @ texts.T
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def member() -> None:
        n = 3 * dist.get_world_size()
        images, texts = data(n, 5).requires_grad_(), data(n, 5, seed=1).requires_grad_()
        scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
        own = [mine(images), mine(texts), scale.detach().clone().requires_grad_()]
        loss = contrastive_loss(*own)
        loss.backward()
        whole = twin(images, texts, scale)
        whole.backward()
        same([summed(loss.detach())], [whole.detach()])
        same([own[0].grad, own[1].grad], [mine(images.grad), mine(texts.grad)])
        same([summed(own[2].grad)], [scale.grad])
        gradcheck(contrastive_loss, [own[0][:1, :2], own[1][:1, :2], own[2]])

    run(member, world_size)


@pytest.mark.narrow({"world_size": 2})
@WORLDS
def test_tensor_parallel_linear(run: Run, world_size: int) -> None:
    def member() -> None:
        first, second = linear(6, 8, seed=1), linear(8, 5, seed=2)
        column, row = ColumnParallelLinear(first), RowParallelLinear(second)
        x, cotangent = data(3, 6).requires_grad_(), data(3, 5, seed=1)
        own = x.detach().clone().requires_grad_()
        out, whole = row(F.gelu(column(own))), second(F.gelu(first(x)))
        # All ranks hold the output, and each computes the whole loss with it: no sum over ranks.
        out.backward(cotangent)
        whole.backward(cotangent)
        same([out, own.grad, row.bias.grad], [whole, x.grad, second.bias.grad])
        same(
            [column.weight.grad, column.bias.grad, row.weight.grad],
            [mine(first.weight.grad), mine(first.bias.grad), mine(second.weight.grad, 1)],
        )

    run(member, world_size)


@WORLDS
@pytest.mark.parametrize("is_causal", [False, True])
def test_ulysses_attention(run: Run, world_size: int, is_causal: bool) -> None:
    def member() -> None:
        attention(
            lambda q, k, v: ulysses_attention(q, k, v, is_causal=is_causal), is_causal=is_causal
        )

    run(member, world_size)


@WORLDS
def test_ring_attention(run: Run, world_size: int) -> None:
    run(lambda: attention(ring_attention), world_size)


def attention(layer: Callable[..., Tensor], **options: Any) -> None:
    """The layer on each rank's piece of the sequence, and torch's on the whole."""
    shape = (2, 4, 3 * dist.get_world_size(), 6)
    whole = [data(*shape, seed=seed).requires_grad_() for seed in range(3)]
    own = [mine(x, 2) for x in whole]
    cotangent = data(*shape, seed=3)
    out, twin = layer(*own), F.scaled_dot_product_attention(*whole, **options)
    out.backward(mine(cotangent, 2))
    twin.backward(cotangent)
    same(
        [out, *(x.grad for x in own)],
        [mine(t, 2) for t in (twin.detach(), *(x.grad for x in whole))],
    )


@pytest.mark.parametrize("rows", [(3, 3), (2, 5), (2, 4, 3, 2)])
def test_halo_convolution(run: Run, rows: tuple[int, ...]) -> None:
    def member() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            twin = nn.Conv2d(2, 3, (5, 3), padding="same", dtype=F64)
        layer = HaloConv2d(copy.deepcopy(twin))
        whole, rank = data(2, 2, sum(rows), 4).requires_grad_(), dist.get_rank()
        own = whole.detach().split(rows, 2)[rank].clone().requires_grad_()
        out, expected = layer(own), twin(whole)
        cotangent = data(*expected.shape, seed=1)
        out.backward(cotangent.split(rows, 2)[rank])
        expected.backward(cotangent)
        assert whole.grad is not None
        same([out, own.grad], [t.split(rows, 2)[rank] for t in (expected, whole.grad)])
        same(
            [summed(layer.weight.grad), summed(layer.bias.grad)], [twin.weight.grad, twin.bias.grad]
        )

    run(member, len(rows))


@pytest.mark.parametrize("tokens", [(5, 0), (3, 4), (4, 2, 0, 3)])
def test_mixture_of_experts(run: Run, tokens: tuple[int, ...]) -> None:
    def twin(x: Tensor, router: nn.Module, experts: Sequence[nn.Module]) -> Tensor:
        weight, choice = router(x).softmax(-1).max(-1)
        everyone = torch.stack([expert(x) for expert in experts], 1)
        return everyone[torch.arange(len(x)), choice] * weight[:, None]

    def member() -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        x, cotangent = data(sum(tokens), 5).requires_grad_(), data(sum(tokens), 5, seed=1)
        router, own_router = linear(5, world, seed=2), linear(5, world, seed=2)
        experts = [linear(5, 5, seed=10 + i) for i in range(world)]
        layer = MixtureOfExperts(own_router, linear(5, 5, seed=10 + rank))
        own = x.detach().split(tokens)[rank].clone().requires_grad_()
        out, whole = layer(own), twin(x, router, experts)
        out.backward(cotangent.split(tokens)[rank])
        whole.backward(cotangent)
        assert x.grad is not None
        same([out, own.grad], [whole.split(tokens)[rank], x.grad.split(tokens)[rank]])
        same([summed(own_router.weight.grad)], [router.weight.grad])
        same([layer.expert.weight.grad], [experts[rank].weight.grad])

    run(member, len(tokens))
