"""scatter and gather without gradients."""

from __future__ import annotations

import pytest
import torch

from gradwire.devices import broadcast, gather, scatter
from gradwire.errors import ArgumentError


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_scatter_gives_every_place_its_chunk(
    places: list[str], dim: int, dtype: torch.dtype
) -> None:
    x = torch.randn(8, 12, dtype=dtype, device=places[0])
    chunks = scatter(x, places, dim=dim)
    assert [c.device for c in chunks] == [torch.device(p) for p in places]
    assert torch.equal(torch.cat([c.cpu() for c in chunks], dim), x.cpu())
    # A view at the tensor's own place, copies elsewhere.
    assert chunks[0].data_ptr() == x.data_ptr()
    assert chunks[0]._base is x
    assert all(c._base is None for c in chunks[1:])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_scatter_cuts_as_chunk_does(size: int, k: int) -> None:
    x = torch.randn(size, 2)
    expected = x.chunk(k)
    assert [tuple(c.shape) for c in scatter(x, ["cpu"] * k)] == [tuple(c.shape) for c in expected]


@pytest.mark.parametrize("sizes", [(2, 4), (0, 6), (6, 0), (1, 0, 3, 2)])
def test_scatter_with_given_sizes(sizes: tuple[int, ...]) -> None:
    x = torch.randn(6, 4)
    chunks = scatter(x, ["cpu"] * len(sizes), sizes)
    assert [c.shape[0] for c in chunks] == list(sizes)
    assert torch.equal(torch.cat(chunks), x)


def test_scatter_into_given_tensors(places: list[str]) -> None:
    x = torch.randn(4, 10, device=places[0])
    out = [torch.empty(4, i, device=p) for i, p in enumerate(places, 1)]
    x = x[:, : sum(o.shape[1] for o in out)]
    results = scatter(x, dim=1, out=out)
    assert all(r is o for r, o in zip(results, out, strict=True))
    assert torch.equal(torch.cat([r.cpu() for r in results], 1), x.cpu())


def test_scatter_of_conjugated_tensors() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64).conj()
    for dim in (0, -1):
        chunks = scatter(x, ["cpu"] * 3, dim=dim)
        assert all(c.is_complex() for c in chunks)
        assert torch.equal(torch.cat(chunks, dim), x.resolve_conj())
        assert torch.equal(gather(chunks, dim), x.resolve_conj())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_joins_in_order(places: list[str], dim: int) -> None:
    inputs = [torch.randn(2, 5, device=p) for p in places]
    expected = torch.cat([t.cpu() for t in inputs], dim)
    for destination in (None, -1, "cpu", torch.device("cpu"), places[-1]):
        result = gather(inputs, dim, destination)
        assert torch.equal(result.cpu(), expected)
    assert gather(inputs, dim).device == torch.device(places[0])
    assert gather(inputs, dim).data_ptr() != inputs[0].data_ptr()
    out = torch.empty(expected.shape)
    assert gather(inputs, dim, out=out) is out
    assert torch.equal(out, expected)


def test_gather_of_scalars_is_a_vector() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        result = gather([torch.tensor(1.0), torch.tensor(2.0)])
    assert result.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((10, 3, 4, 4), torch.channels_last), ((10, 3, 2, 4, 4), torch.channels_last_3d)],
)
def test_memory_formats_survive(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    x = torch.randn(shape).to(memory_format=memory_format)
    chunks = scatter(x, ["cpu"] * 2)
    assert all(c.is_contiguous(memory_format=memory_format) for c in chunks)
    whole = gather(chunks)
    assert whole.is_contiguous(memory_format=memory_format)
    assert torch.equal(whole, x)
    assert gather([chunks[0], chunks[1].contiguous()]).is_contiguous()


def test_results_that_share_memory_are_refused() -> None:
    x = torch.arange(4.0)
    with pytest.raises(ArgumentError, match=r"out\[0\] shares memory with tensor, which would be"):
        scatter(x, out=[x[2:], x[:2]])
    both = torch.zeros(3)
    with pytest.raises(
        ArgumentError, match=r"out\[1\] shares memory with out\[0\]: one would overwrite"
    ):
        scatter(x, out=[both[:2], both[1:]])
    with pytest.raises(ArgumentError, match=r"out shares memory with tensors\[1\], which would be"):
        gather([x[2:], x[:2]], out=x)
    with pytest.raises(ArgumentError, match=r"out\[0\] shares memory with tensor, which would be"):
        broadcast(x[:2], out=[x[1:3], torch.empty(2)])
    with pytest.raises(
        ArgumentError, match=r"out\[0\] has shape \(2, 2\) and strides \(0, 1\), so"
    ):
        broadcast(x.view(2, 2), out=[torch.zeros(1, 2).expand(2, 2)])
    assert torch.equal(x, torch.arange(4.0))


def test_results_beside_each_other_in_one_matrix() -> None:
    """Columns of one matrix lie between each other's, but share no element; nor is a chunk moved
    that is its own result."""
    x, matrix = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    scatter(x, dim=1, out=[matrix[:, :1], matrix[:, 1:]])
    assert torch.equal(matrix, x)
    wide = torch.cat([x, torch.zeros(3, 2)], 1)
    gather([wide[:, :2], x[:, 2:], wide[:, :2]], dim=1, out=wide)
    assert torch.equal(wide, torch.cat([x, x[:, :2]], 1))
    assert scatter(x, out=[x[:2], x[2:]])[1].tolist() == [[8.0, 9.0, 10.0, 11.0]]
