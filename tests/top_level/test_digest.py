"""The digest of tensors' bits, which all comparisons of values use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire._digest import digest

X = torch.randn(1001, 128, generator=torch.Generator().manual_seed(0))


def swapped(x: Tensor, a: int, b: int) -> Tensor:
    """Return a copy with two rows exchanged: equal sums, and equal rows of 512 bytes."""
    rows = list(range(len(x)))
    rows[a], rows[b] = b, a
    return x[rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_equal_bits_have_one_digest_in_any_memory(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    padded = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
    for y in (x.clone(), x.t().contiguous().t(), padded, x.conj().clone().conj()):
        assert digest([y]) == digest([x])


@pytest.mark.parametrize("rows", [3, 100, 1001])  # small, less than a piece, several pieces
def test_each_bit_and_its_place_count(rows: int) -> None:
    x = X[:rows].repeat(40, 1) if rows == 1001 else X[:rows]
    last = x.clone()
    last[-1, -1] = -last[-1, -1]
    others = [swapped(x, 0, 1), swapped(x, 0, len(x) - 1), x.flip(1), last, x[:-1]]
    found = [digest([y]) for y in (x, *others)]
    assert len({*found}) == len(found)


def test_order_of_tensors_and_special_values() -> None:
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert digest([a, b]) != digest([b, a])
    assert digest([torch.full((3,), float("nan"))]) == digest([torch.full((3,), float("nan"))])
    assert digest([]) == digest(iter(())) != digest([torch.zeros(3)])
    assert digest([torch.ones(2).requires_grad_(), torch.zeros(0)]) == digest([torch.ones(2)])


def test_the_default_dtype_does_not_matter() -> None:
    expected = digest([X])
    torch.set_default_dtype(torch.float16)
    try:
        assert digest([X]) == expected
    finally:
        torch.set_default_dtype(torch.float32)
