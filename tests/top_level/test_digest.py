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


def negated(x: Tensor, *indices: int) -> Tensor:
    """Return a copy with the signs of some elements changed."""
    y = x.clone()
    y.view(-1)[list(indices)] *= -1
    return y


def bits(x: Tensor, *values: int) -> Tensor:
    """Return a copy whose first elements have these bits."""
    y = x.clone()
    y.view(-1)[: len(values)] = torch.tensor(values, dtype=torch.int32).view(torch.float32)
    return y


@pytest.mark.parametrize("rows", [100, 1001, 3000])  # bytes: in one pass, alone, in several chunks
def test_changes_that_cancel_in_sums(rows: int) -> None:
    x = X.repeat(3, 1)[:rows]
    ones = torch.ones_like(x)
    one_row = negated(ones, *range(128))
    shuffled = x.view(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))]
    nan, other_nan, negative_nan = 0x7FC00000, 0x7FC00001, -0x400000
    tensors = {
        "itself": [x],
        "all negated": [-x],
        "two signs of a column": [negated(x, 1, 129)],
        "two signs of a row": [negated(x, 0, 1)],
        "signs far apart": [negated(x, 3, x.numel() - 125)],
        "four signs": [negated(x, 1, 2, 129, 130)],
        "rows swapped": [swapped(x, 1, rows - 1)],
        "columns swapped": [swapped(x.t(), 0, 64).t()],
        "elements permuted": [shuffled.view(x.shape)],
        "ones": [ones],
        "ones, a row negated": [one_row],
        "ones, another row negated": [swapped(one_row, 0, 64)],
        "moved by second differences": [bits(x, *(0x3F800000 + d for d in (1, -2, 1)))],
        "0.0": [bits(x, 0, 0)],
        "-0.0": [bits(x, -(1 << 31), -(1 << 31))],
        "one -0.0": [bits(x, -(1 << 31), 0)],
        "NaN": [bits(x, nan)],
        "NaN with a payload": [bits(x, other_nan)],
        "negative NaN": [bits(x, negative_nan)],
        "pair": [x, ones],
        "parameters swapped": [ones, x],
    }
    names: dict[bytes, str] = {}
    for name, each in tensors.items():
        assert names.setdefault(digest(each), name) == name


def test_the_default_dtype_does_not_matter() -> None:
    expected = digest([X])
    torch.set_default_dtype(torch.float16)
    try:
        assert digest([X]) == expected
    finally:
        torch.set_default_dtype(torch.float32)
