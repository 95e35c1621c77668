"""Statistics over a group are torch's on the ranks' tensors joined, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import collectives as C
from gradwire.errors import ArgumentError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

STATISTICS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "mean": (C.mean, lambda x: x.mean(0)),
    "var": (C.var, lambda x: x.var(0)),
    "norm": (lambda x, dim: C.norm(x, 2, dim), lambda x: x.norm(dim=0)),
    "norm 1": (lambda x, dim: C.norm(x, 1, dim), lambda x: x.norm(1, 0)),
    "norm inf": (lambda x, dim: C.norm(x, float("inf"), dim), lambda x: x.norm(torch.inf, 0)),
    "logsumexp": (C.logsumexp, lambda x: x.logsumexp(0)),
    "softmax": (C.softmax, lambda x: x.softmax(0)),
}
WITH_COMPLEX = ["mean", "var", "norm"]


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_statistics_match_those_of_the_concatenation(name: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and name not in WITH_COMPLEX:
        return
    ours, torchs = STATISTICS[name]
    # More elements than half-precision numbers can count, and than float16 can sum.
    whole = torch.randn(70_001, dtype=dtype, generator=torch.Generator().manual_seed(3))
    sizes = [30_000, 40_001]

    def member(whole: Tensor) -> Tensor:
        return ours(whole.split(sizes)[dist.get_rank()], 0)

    results = run_ranks(member, args=(whole,))
    # In single precision, torch's own result depends on how many threads this process has.
    exact = whole.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = torchs(exact)
    expected = expected.to(dtype if expected.is_complex() else results[0].dtype)
    if name == "softmax":
        results = [torch.cat(results)]
    for result in results:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", STATISTICS)
def test_integers_are_refused(name: str) -> None:
    def member() -> None:
        with pytest.raises(ArgumentError, match="give floating-point or complex numbers"):
            STATISTICS[name][0](torch.ones(3, dtype=torch.int64), 0)

    run_ranks(member)


@pytest.mark.parametrize("p", [1, 2, 3, float("inf")])
def test_norms_of_infinities_and_of_ranks_without_elements(p: float) -> None:
    def member() -> tuple[list[float], list[float]]:
        whole = torch.tensor([3.0, -torch.inf])
        empty = torch.zeros(0, requires_grad=True)
        x = torch.tensor([1.0, 2.0], requires_grad=True) if dist.get_rank() else empty
        y = C.norm(x, p, 0)
        y.backward()
        return [C.norm(whole, p, 0).item(), C.norm(empty, p, 0).item(), y.item()], x.grad.tolist()

    def expected() -> tuple[list[float], list[float]]:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x.norm(p)
        (2 * y).backward()  # of both ranks' losses
        return [torch.inf, 0.0, y.item()], x.grad.tolist()

    (numbers, none), (same, gradient) = run_ranks(member)
    assert (numbers, none) == (same, [])
    assert (numbers, gradient) == (
        pytest.approx(expected()[0]),
        pytest.approx(expected()[1]),
    )


def test_duplicate_dims_are_refused() -> None:
    def member() -> None:
        with pytest.raises(ArgumentError, match=r"dim is \[0, -1\]: a dim occurs twice"):
            C.mean(torch.ones(3), (0, -1))

    run_ranks(member, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("p", [1, 2, 3, 4, float("inf")])
def test_second_derivatives_of_norms_at_zeros(p: float, dtype: torch.dtype) -> None:
    whole = torch.tensor([3, 0, 0, -4], dtype=dtype)
    vector = torch.tensor([1, 2, 3, 4], dtype=dtype)

    def product(norm: Callable[[Tensor], Tensor], x: Tensor, vector: Tensor) -> Tensor:
        """Multiply the second derivatives by a vector."""
        x.requires_grad_()
        y = norm(x)
        (gradient,) = torch.autograd.grad(y * y, x, create_graph=True)
        return torch.autograd.grad((gradient * vector.conj()).real.sum(), x)[0].resolve_conj()

    def member() -> tuple[Tensor, Tensor]:
        mine = [x.split([4, 0])[dist.get_rank()].clone() for x in (whole, vector)]
        zeros = torch.zeros(2, dtype=dtype)
        return product(lambda x: C.norm(x, p, 0), *mine), product(
            lambda x: C.norm(x, p, 0), zeros, vector[:2]
        )

    (result, at_zero), _ = run_ranks(member)
    expected = product(lambda x: torch.linalg.vector_norm(x, p), whole, vector)
    torch.testing.assert_close(result, 2 * expected)  # of both ranks
    assert not at_zero.any()


@pytest.mark.parametrize("name", STATISTICS)
def test_second_derivatives_of_statistics_with_an_empty_rank(name: str) -> None:
    ours, torchs = STATISTICS[name]
    whole = torch.tensor([1.5, 0.0, -2.0, 1.0], dtype=torch.float64)

    def second(statistic: Callable[[Tensor], Tensor], x: Tensor, ranks: int) -> Tensor:
        x.requires_grad_()
        loss = statistic(x).square().sum() / ranks
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        # The ranks call a second backward together, those without elements too.
        assert gradient.requires_grad
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    def member() -> Tensor:
        x = whole[: dist.get_rank() * 4].clone()
        return second(lambda x: ours(x, 0), x, 1 if name == "softmax" else 2)

    results = run_ranks(member)
    torch.testing.assert_close(torch.cat(results), second(torchs, whole.clone(), 1))


@pytest.mark.parametrize("name", ["mean", "var"])
def test_second_derivatives_of_statistics_without_results(name: str) -> None:
    def member() -> None:
        x = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
        loss = STATISTICS[name][0](x, 1).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        # A second backward continues to the collectives before, in which other ranks wait.
        assert gradient.requires_grad
        assert torch.autograd.grad(gradient.sum(), x)[0].shape == x.shape

    run_ranks(member)
