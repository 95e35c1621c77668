"""pack and unpack are inverses, for any strides, shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.buckets import memory_strides, pack, unpack, views
from gradwire.errors import ArgumentError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn, dtypes=DTYPES) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    t = torch.randint(0, 2, shape, dtype=torch.int64).to(dtype)
    match draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded", "conj"])):
        case "transposed" if t.dim() >= 2:
            t = t.transpose(0, -1)
        case "sliced" if t.dim() >= 1:
            t = torch.cat([t, t], dim=-1)[..., : t.shape[-1]]
        case "expanded" if t.dim() >= 1 and t.shape[0] >= 1:
            t = t[:1].expand_as(t)
        case "conj" if t.is_complex():
            t = (t * 1j).conj()
    return t


def other_strides(t: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape and dtype, its dimensions laid out backwards."""
    back = tuple(range(t.dim()))[::-1]
    return torch.empty([t.shape[d] for d in back], dtype=t.dtype).permute(back)


@given(st.lists(tensors(), max_size=6))
def test_unpack_inverts_pack_whatever_the_strides(given_tensors):
    buffer = pack(given_tensors)
    received = [other_strides(t) for t in given_tensors]
    unpack(buffer, received)
    for t, view, back in zip(given_tensors, views(buffer, given_tensors), received, strict=True):
        assert view.is_contiguous()
        assert torch.equal(view, t)
        assert torch.equal(back, t)


@given(st.lists(tensors(), max_size=6))
def test_views_with_strides_hold_what_is_copied_into_them(given_tensors):
    kept = views(pack(given_tensors), given_tensors, keep_strides=True)
    for view, t in zip(kept, given_tensors, strict=True):
        view.copy_(t)
    for t, view in zip(given_tensors, kept, strict=True):
        assert torch.equal(view, t)
        if memory_strides(t):
            assert view.stride() == t.stride()


@given(st.lists(tensors(dtypes=[torch.float32]), min_size=1, max_size=6))
def test_one_dtype_has_no_gaps(given_tensors):
    buffer = pack(given_tensors)
    assert buffer.dtype == torch.float32
    assert buffer.numel() == sum(t.numel() for t in given_tensors)


def test_out_is_used_and_may_be_longer():
    out = torch.zeros(10)
    assert pack([torch.ones(3)], out=out) is out
    assert out.tolist() == [1.0] * 3 + [0.0] * 7


def test_channels_last_views_keep_memory_order():
    weight = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    buffer = torch.empty(24)
    (view,) = views(buffer, [weight], keep_strides=True)
    view.copy_(weight)
    assert torch.equal(buffer, weight.as_strided((24,), (1,)))


def test_views_of_a_slice_start_where_the_slice_starts():
    buffer = torch.arange(8.0)[2:]
    assert views(buffer, [torch.empty(2), torch.empty(2, 2)])[1].tolist() == [
        [4.0, 5.0],
        [6.0, 7.0],
    ]


def test_an_out_with_strides_is_written_where_its_elements_are():
    tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor(5.0)]
    memory = torch.zeros(12)
    out = pack(tensors, out=memory[1::2])
    assert memory[1::2].tolist() == [1.0, 3.0, 2.0, 4.0, 5.0, 0.0]
    assert memory[::2].count_nonzero() == 0
    received = [torch.zeros(2, 2), torch.zeros(())]
    unpack(out, received)
    assert all(torch.equal(a, b) for a, b in zip(received, tensors, strict=True))
    for buffer in (torch.tensor([7.0]).expand(5), memory[1::2]):
        assert [v.flatten().tolist() for v in views(buffer, tensors)] == [
            buffer[:4].tolist(),
            buffer[4:5].tolist(),
        ]


def test_bytes_of_several_dtypes_lie_one_after_another():
    mixed = [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]
    with pytest.raises(ArgumentError, match=r"buffer has stride 2: .*contiguous\(\)"):
        views(torch.zeros(64, dtype=torch.uint8)[::2], mixed)


@pytest.mark.parametrize(
    "out", [torch.empty(2), torch.empty(3, dtype=torch.float64), torch.empty(3, 1)]
)
def test_an_out_that_does_not_fit(out):
    with pytest.raises(ArgumentError, match=r"these 1 tensors need torch\.float32"):
        pack([torch.ones(3)], out=out)


def test_views_of_a_compressed_buffer_have_its_dtype():
    (view,) = views(torch.ones(4, dtype=torch.bfloat16), [torch.empty(2, 2)])
    assert view.dtype == torch.bfloat16


def test_devices_must_agree():
    with pytest.raises(ArgumentError, match=r"tensors\[1\] is on meta"):
        pack([torch.ones(1), torch.ones(1, device="meta")])


def test_nothing_to_pack():
    assert pack([]).numel() == 0
    unpack(torch.empty(0), [])
