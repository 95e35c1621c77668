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
