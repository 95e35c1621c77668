"""broadcast, reduce_add and their coalesced forms without gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.devices import (
    broadcast,
    broadcast_coalesced,
    reduce_add,
    reduce_add_coalesced,
)


def sparse(shape: tuple[int, ...], entries: int, dtype: torch.dtype) -> Tensor:
    indices = torch.stack([torch.randint(n, (entries,)) for n in shape])
    values = torch.randint(-9, 9, (entries,)).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def mixed(device: str) -> list[Tensor]:
    """Tensors of all sorts that one coalesced call takes."""
    return [
        t.to(device)
        for t in (
            sparse((2, 3), 1, torch.float64),
            torch.randn(5).long(),
            torch.randn(5),
            sparse((2, 3), 10, torch.float64),
            sparse((3, 3), 7, torch.int64),
            torch.randn(3, 4, 2, dtype=torch.complex64),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.empty(0),
            torch.empty(3, 0, 2, dtype=torch.float64),
            torch.randn(()),
            torch.randn(10).int(),
            torch.randn(6, 4).t(),
            torch.randn(8, 8)[::2, 1:3],
            torch.randn(4) > 0,
            torch.randn(5).to(torch.bfloat16),
        )
    ]


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(dense(a).cpu(), dense(b).cpu())


def storages(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_broadcast_copies_to_every_place_but_its_own(places: list[str]) -> None:
    x = torch.randn(5, 5, device=places[0])
    replicas = broadcast(x, places)
    assert replicas[0] is x
    assert [r.device for r in replicas] == [torch.device(p) for p in places]
    assert all(same(r, x) for r in replicas)
    assert len(storages(list(replicas))) == len(places)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
        lambda: torch.randn(6, 6).t(),
    ],
)
def test_copies_keep_strides(make: Callable[[], Tensor]) -> None:
    x = make()
    assert all(r.stride() == x.stride() for r in broadcast(x, ["cpu"] * 3))
    lists = broadcast_coalesced([x, torch.ones(3)], ["cpu"] * 3)
    assert all(r[0].stride() == x.stride() and torch.equal(r[0], x) for r in lists)


def test_conjugated_and_negated_views_are_copied_by_value(places: list[str]) -> None:
    x = torch.randn(4, 3, dtype=torch.complex64, device=places[0])
    for view in (x.conj(), x.conj().imag, x.t().conj()):
        expected = view.resolve_conj().resolve_neg()
        assert all(same(r.resolve_conj().resolve_neg(), expected) for r in broadcast(view, places))
        lists = broadcast_coalesced([view, view], places)
        assert all(same(t.resolve_conj().resolve_neg(), expected) for r in lists for t in r)
        total = reduce_add([view, view, view])
        assert same(total, expected + expected + expected)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_broadcast_of_sparse_tensors(layout: torch.layout) -> None:
    x = torch.eye(3).to_sparse(layout=layout)
    first, second = broadcast(x, ["cpu"] * 2)
    assert first is x
    assert second is not x
    assert torch.equal(second.to_dense(), torch.eye(3))
    assert second.values().data_ptr() != x.values().data_ptr()


def test_broadcast_into_given_tensors(places: list[str]) -> None:
    x = torch.randn(5, 5, device=places[0])
    for first in (x, torch.empty_like(x)):
        out = [first, *(torch.empty_like(x, device=p) for p in places[1:])]
        results = broadcast(x, out=out)
        assert all(r is o for r, o in zip(results, out, strict=True))
        assert all(same(r, x) for r in results)


@pytest.mark.parametrize("buffer_size", [1, 100, 10 << 20])
def test_broadcast_coalesced(places: list[str], buffer_size: int) -> None:
    tensors = mixed(places[0])
    lists = broadcast_coalesced(tensors, places, buffer_size)
    assert all(a is b for a, b in zip(lists[0], tensors, strict=True))
    for place, replica in zip(places, lists, strict=True):
        assert all(t.device == torch.device(place) for t in replica)
        assert all(same(t, x) for t, x in zip(replica, tensors, strict=True))


def test_coalesced_results_of_every_sort_have_version_counters_of_their_own() -> None:
    tensors = mixed("cpu")
    copies = broadcast_coalesced(tensors, ["cpu"] * 2, 100)[1]
    sums = reduce_add_coalesced([tensors, copies], buffer_size=100)
    results = [*copies, *sums]
    assert len(storages(broadcast_coalesced([torch.ones(5)] * 4, ["cpu"] * 2)[1])) == 1
    for i, tensor in enumerate(results):
        versions = [t._version for t in results]
        tensor.zero_()
        versions[i] += 1
        assert [t._version for t in results] == versions


def test_reduce_add_adds_in_index_order_whatever_the_destination(places: list[str]) -> None:
    size = 3 << 20  # several pieces
    inputs = [torch.randn(size, device=place) * 10**i for i, place in enumerate(places)]
    expected = inputs[0].cpu()
    for other in inputs[1:]:
        expected = expected + other.cpu()
    assert reduce_add(inputs).device == torch.device(places[0])
    for destination in {None, -1, *places}:
        result = reduce_add(inputs, destination)
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_sums_in_any_number_of_threads(threads: int) -> None:
    sizes = [5 << 20, 7, 40_000, 3 << 20, 32768, 31744, 1]
    lists = [[torch.randn(n) for n in sizes] for _ in range(3)]
    expected = [a + b + c for a, b, c in zip(*lists, strict=True)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mode in (torch.enable_grad(), torch.inference_mode()):
            with mode:
                sums = reduce_add_coalesced(lists, buffer_size=64 << 20)
                assert all(torch.equal(s, e) for s, e in zip(sums, expected, strict=True))
                column = [tensors[0] for tensors in lists]
                assert torch.equal(reduce_add(column), expected[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex128])
def test_reduce_add_of_every_kind_of_dtype(dtype: torch.dtype) -> None:
    inputs = [(torch.randn(7) * 3).to(dtype) for _ in range(3)]
    expected = inputs[0] + inputs[1] + inputs[2]
    assert torch.equal(reduce_add(inputs), expected)
    for total in reduce_add_coalesced([[x, x] for x in inputs]):
        assert torch.equal(total, expected)


def test_reduce_add_with_other_strides_and_shapes() -> None:
    base = torch.randn(1 << 10, 1 << 10)
    inputs = [
        base,
        base.t(),
        base.expand(1 << 10, 1 << 10),
        torch.randn(1 << 11, 1 << 11)[::2, ::2],
    ]
    assert torch.equal(reduce_add(inputs), inputs[0] + inputs[1] + inputs[2] + inputs[3])
    assert reduce_add([base.t(), base.t()]).stride() == base.t().stride()
    assert reduce_add([torch.empty(0, 3)] * 2).shape == (0, 3)


def test_reduce_add_of_sparse_tensors() -> None:
    inputs = [sparse((3, 4), 6, torch.float64) for _ in range(3)]
    total = reduce_add(inputs)
    assert total.is_sparse
    assert torch.equal(total.to_dense(), sum(t.to_dense() for t in inputs))


@pytest.mark.parametrize("buffer_size", [1, 100, 10 << 20])
def test_reduce_add_coalesced(places: list[str], buffer_size: int) -> None:
    tensors = mixed("cpu")
    lists = [[t.to(p) for t in tensors] for p in places]
    sums = reduce_add_coalesced(lists, buffer_size=buffer_size)
    assert len(sums) == len(tensors)
    for total, tensor in zip(sums, tensors, strict=True):
        expected = dense(tensor)
        for _ in places[1:]:
            expected = expected + dense(tensor)
        assert total.device == torch.device(places[0])
        assert total.layout == tensor.layout
        assert same(total, expected)


def test_reduce_add_coalesced_has_the_bits_of_reduce_add() -> None:
    lists = [[torch.randn(n) * 10**i for n in (3, 700_000, 5, 40_000)] for i in range(5)]
    for total, column in zip(reduce_add_coalesced(lists), zip(*lists, strict=True), strict=True):
        assert torch.equal(total, reduce_add(column))


def test_reduce_add_coalesced_with_some_replicas_sparse() -> None:
    x = torch.randn(3, 3)
    total, other = reduce_add_coalesced([[x.to_sparse(), x], [x, x], [x.to_sparse(), x]])
    assert total.layout == torch.strided
    assert torch.equal(total, x + x + x)
    assert torch.equal(other, x + x + x)
