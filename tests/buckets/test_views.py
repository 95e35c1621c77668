"""Views of tensors in a flat buffer, for any shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.buckets import memory_strides, views
from gradwire.errors import ArgumentError


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    t = torch.rand(shape)
    match draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded"])):
        case "transposed" if t.dim() >= 2:
            t = t.transpose(0, -1)
        case "sliced" if t.dim() >= 1:
            t = torch.cat([t, t], dim=-1)[..., : t.shape[-1]]
        case "expanded" if t.dim() >= 1 and t.shape[0] >= 1:
            t = t[:1].expand_as(t)
    return t


@given(st.lists(tensors(), max_size=6))
def test_views_hold_what_is_copied_into_them(given_tensors):
    buffer = torch.empty(sum(t.numel() for t in given_tensors))
    inside = views(buffer, given_tensors)
    for view, t in zip(inside, given_tensors, strict=True):
        view.copy_(t)
    for t, view in zip(given_tensors, inside, strict=True):
        assert torch.equal(view, t)
        if memory_strides(t):
            assert view.stride() == t.stride()


def test_channels_last_views_keep_memory_order():
    weight = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    buffer = torch.empty(24)
    (view,) = views(buffer, [weight])
    view.copy_(weight)
    assert torch.equal(buffer, weight.as_strided((24,), (1,)))


def test_views_of_a_slice_start_where_the_slice_starts():
    buffer = torch.arange(8.0)[2:]
    assert views(buffer, [torch.empty(2), torch.empty(2, 2)])[1].tolist() == [
        [4.0, 5.0],
        [6.0, 7.0],
    ]


def test_views_have_the_dtype_of_the_buffer():
    (view,) = views(torch.ones(4, dtype=torch.bfloat16), [torch.empty(2, 2)])
    assert view.dtype == torch.bfloat16


@pytest.mark.parametrize("buffer", [torch.empty(2), torch.empty(3, 1)])
def test_a_buffer_that_does_not_fit(buffer):
    with pytest.raises(ArgumentError, match="these 1 tensors need one dimension of at least 3"):
        views(buffer, [torch.ones(3)])
