"""all_reduce with a cached setup, compared with the ordinary algorithm."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ArgumentError, MismatchError
from gradwire.recorder.flight_record import flight_record
from gradwire.shm.header import DTYPES
from gradwire.shm.reduction import OPS, check_reduction
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SHAPES = [(), (1,), (7,), (3, 1, 2), (0, 3)]


def kinds():
    for shape, dtype, number in itertools.product(SHAPES, DTYPES, OPS):
        op = dist.ReduceOp.RedOpType(number)
        try:
            check_reduction(number, dtype)
        except ArgumentError:
            continue
        if not (dtype.is_complex and op == dist.ReduceOp.PRODUCT):  # which torch refuses
            yield shape, dtype, op


def prepared_beside_ordinary():
    rank = dist.get_rank()
    for shape, dtype, op in kinds():
        x = (torch.arange(torch.Size(shape).numel()) * (rank + 3) % 5 + rank).view(shape).to(dtype)
        # tensors that are not contiguous, as with more than one element, are not prepared for
        gaps = torch.stack([x, x], -1)[..., 0]
        version = x._version
        for _ in range(3):  # the second prepares
            dist.all_reduce(x, op)
            dist.all_reduce(gaps, op)
            assert str(x.tolist()) == str(gaps.tolist()), (shape, dtype, op)
        assert x._version >= version + 3 or not x.numel()
    assert shm_backend_of(dist.group.WORLD).known._of


@pytest.mark.narrow({"world": 2})
@pytest.mark.parametrize("world", [1, 2, 3])
def test_cached_calls_give_the_same_bits(world):
    run_ranks(prepared_beside_ordinary, world, backend="shm", timeout=60)


@pytest.mark.on_ranks(2)
def test_the_cache_is_bounded_and_errors_are_the_same():
    group = shm_backend_of(dist.group.WORLD)
    most = group.state.inline_bytes // 4
    for _ in range(2):
        assert not any(group.known._of.values())
        for count in (0, 1, most, most + 1):  # the last does not travel with the header
            dist.all_reduce(torch.ones(count))
    assert [known is not None for known in group.known._of.values()] == [False, True, True, False]
    for count in range(1, 300):
        x = torch.ones(count)
        dist.all_reduce(x)
        assert x.eq(2).all()
    assert len(group.known._of) <= 256
    with pytest.raises(MismatchError, match="number of elements"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    with pytest.raises(MismatchError, match="different collectives"):
        dist.all_reduce(torch.ones(3)) if dist.get_rank() else dist.broadcast(torch.ones(3), 0)
    with pytest.raises(MismatchError):  # its mark, beside that of another call
        gradwire.all_reduce(torch.ones(3), "max" if dist.get_rank() else "sum")
    x = torch.ones(2, 3) if dist.get_rank() else torch.ones(6)  # as many elements
    dist.all_reduce(x)
    assert x.eq(2).all()
    numbers = [torch.full((), 1.0 + i) for i in range(5)]
    works = [dist.all_reduce(number, async_op=True) for number in numbers]
    y = torch.ones(())
    dist.all_reduce(y)  # after those
    assert all(work.wait() for work in works)
    assert [number.item() for number in numbers] == [2, 4, 6, 8, 10]
    assert y.item() == 2
    dist.destroy_process_group()
    assert not group.known._of


@pytest.mark.on_ranks(2)
def test_cached_calls_are_recorded():
    for _ in range(3):
        dist.all_reduce(torch.ones(2, 3))
    entries = [e for e in flight_record()["entries"] if e["op"] == "all_reduce"][-3:]
    numbers = [entry["op_id"] for entry in entries]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    for entry in entries:
        assert (entry["input_sizes"], entry["output_sizes"]) == ([[2, 3]], [[2, 3]])
        assert entry["state"] == "completed"
        assert entry["frames"][0]["name"] == "test_cached_calls_are_recorded"
    created = [entry["time_created_ns"] for entry in entries]
    assert sorted(set(created)) == created
