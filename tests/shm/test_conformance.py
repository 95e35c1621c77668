"""Operations beside those of test_random_calls.py: each gives the results of a single process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from benchmarks.hosts import Hosts, why_no_hosts

import gradwire.shm
from gradwire._torch import PYTHON_BACKENDS, is_done
from gradwire.errors import MismatchError
from gradwire.shm import meeting, reduction
from gradwire.shm.regions import RINGS
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SIZES = [0, 1, 17, 9_000, 300_001]  # with the header, and through the slots in several pieces
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def value(rank, count, dtype, salt=0):
    """Small whole numbers that differ between ranks, places and blocks; sums are exact."""
    numbers = torch.arange(count) * 7 + rank * 3 + salt
    return (numbers % 5).to(dtype)


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def streamed():
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [(), (0,), (7,), (300, 5), (2, 3, 4), (600_001,), (1, 9)] * 3
    for root in {0, world - 1}:
        lists = []
        for r in range(world):
            torch.manual_seed(r)
            every = [torch.randn(shape) for shape in shapes]
            every[3] = torch.randn(5, 300).t()
            every[6] = torch.randn(1, 9, dtype=torch.complex64).conj()
            every += [t.to(torch.bfloat16) for t in every[4:6]]
            every += [torch.randint(9, (40,)), torch.ones(3, requires_grad=True)]
            lists.append(every)
        options = dist.BroadcastOptions()
        options.rootRank = root
        versions = [t._version for t in lists[rank]]
        # not through torch's dispatcher, which gives copies of what is conjugated
        shm_backend_of(dist.group.WORLD).broadcast(lists[rank], options).wait()
        for got, expected, before in zip(lists[rank], lists[root], versions, strict=True):
            equal(got.detach(), expected.detach())
            assert not got.numel() or (got._version > before) == (rank != root)


def listed():
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (3, 40_000):
        outs = [torch.zeros(count + s) for s in range(world)]
        ins = [torch.full((count + rank,), float(10 * rank + s)) for s in range(world)]
        dist.all_to_all(outs, ins)
        for s, out in enumerate(outs):
            equal(out, torch.full((count + s,), float(10 * s + rank)))
        own = torch.full((count * (rank + 1),), float(rank))
        into = [torch.zeros(count * (s + 1)) for s in range(world)]
        dist.all_gather(into, own)
        for s, got in enumerate(into):
            equal(got, torch.full((count * (s + 1),), float(s)))
        blocks = [torch.full((count * (s + 1),), float(rank)) for s in range(world)]
        out = torch.zeros(count * (rank + 1))
        dist.reduce_scatter(out, blocks)
        equal(out, torch.full((count * (rank + 1),), float(sum(range(world)))))


def averaged():
    world = dist.get_world_size()
    for dtype in (*FLOATS, torch.complex64):
        for count in (5, 100_000):
            x = torch.full((count,), float(dist.get_rank()), dtype=dtype)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            equal(x, torch.full((count,), sum(range(world)) / world, dtype=dtype))
    for dtype in FLOATS:  # whose sum would overflow
        x = torch.full((5,), torch.finfo(dtype).max * 0.75, dtype=dtype)
        want = x.clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        torch.testing.assert_close(x, want)
    for op, expected in (("PRODUCT", 2**world), ("BAND", 2), ("BOR", 2), ("BXOR", 2 * (world % 2))):
        x = torch.full((9,), 2)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        equal(x, torch.full((9,), expected))


def half():
    """Sums of many halves are rounded once: rounding each time would lose the small ones."""
    small = 1.0 if dist.get_rank() == 0 else 2.0**-9
    results = []
    for count in (4, 50_000):
        x = torch.full((count,), small, dtype=torch.bfloat16)
        dist.all_reduce(x)
        inside = gradwire.shm.empty(count, dtype=torch.bfloat16).fill_(small)
        dist.all_reduce(inside)
        equal(inside, x)
        results.append(x.unique().item())
    return results


def test_halves_are_accumulated_in_float32():
    expected = torch.tensor(1 + 3 * 2.0**-9).bfloat16().item()
    assert expected > 1.0
    assert run_ranks(half, 4, backend="shm") == [[expected, expected]] * 4


def messages():
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in SIZES[1:]:
        to, source = (rank + 1) % world, (rank - 1) % world
        first, second = torch.zeros(count), torch.zeros(count)
        sends = [dist.isend(value(rank, count, torch.float32, t), to, tag=t) for t in (1, 2)]
        receives = [dist.irecv(second, source, tag=2), dist.irecv(first, source, tag=1)]
        for work in (*sends, *receives):
            work.wait()
        equal(first, value(source, count, torch.float32, 1))
        equal(second, value(source, count, torch.float32, 2))
    if rank == 0:
        # torch does not pass on the source rank of a Backend written in Python
        has_source = not PYTHON_BACKENDS or dist.get_backend() != "shm"
        for _ in range(world - 1):
            x = torch.zeros(3)
            if has_source:
                assert dist.recv(x, tag=9) == x[0].item()
            else:
                dist.irecv(x, tag=9).wait()
            assert x[0] in range(1, world)
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=9)
    x = torch.zeros(4, 4)
    ops = [dist.P2POp(dist.isend, torch.full((4, 4), float(rank)), (rank + 1) % world)]
    ops.append(dist.P2POp(dist.irecv, x, (rank - 1) % world))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    equal(x, torch.full((4, 4), float((rank - 1) % world)))


def in_flight():
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [torch.full((1 + 5_000 * i,), float(rank)) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    futures = [work.get_future() for work in works]
    dist.barrier()  # runs after all of them
    assert all(is_done(work) for work in works)
    for x, work, future in zip(xs, works, futures, strict=True):
        work.wait()
        equal(x, torch.full_like(x, float(sum(range(world)))))
        assert future.wait()[0].data_ptr() == x.data_ptr()
        assert work.get_future().value()[0].data_ptr() == x.data_ptr()


def objects():
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * 100 * rank})
    assert [g["rank"] for g in gathered] == list(range(world))
    box = [rank]
    dist.broadcast_object_list(box, src=world - 1)
    assert box == [world - 1]
    dist.scatter_object_list(box, list(range(world)) if rank == 0 else None, src=0)
    assert box == [rank]
    into = [None] * world if rank == 0 else None
    dist.gather_object(rank, into, dst=0)
    assert into is None or into == list(range(world))


BODIES = {
    "broadcast of a list": streamed,
    "blocks of different sizes": listed,
    "averages and bits": averaged,
    "messages": messages,
    "several in flight": in_flight,
    "objects": objects,
}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("backend", "body"), [("shm", b) for b in BODIES] + [("gloo", "messages"), ("gloo", "objects")]
)
@pytest.mark.narrow({"backend": "shm", "world": [1, 2, 3]}, {"backend": "gloo", "world": 2})
def test_on_one_host(backend, body, world):
    if body == "messages" and world == 1:
        pytest.skip("a rank sends nothing to itself")
    run_ranks(BODIES[body], world, backend=backend, timeout=20.0)


@pytest.mark.parametrize("hosts", [(2, 2), (1, 3), (3, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.narrow(
    {"hosts": (2, 2), "body": "several in flight"},
    {"hosts": (1, 3), "body": "blocks of different sizes"},
    {"hosts": (2, 1, 1), "body": "messages"},
)
def test_over_hosts(body, hosts):
    run_ranks(BODIES[body], sum(hosts), hosts=hosts, timeout=100.0)


@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts can be made: {why_no_hosts()}")
@pytest.mark.wide
@pytest.mark.parametrize("ranks", [(2, 2), (1, 3), (2, 1, 1)], ids=str)
def test_over_hosts_that_share_no_network(ranks):
    def teams():
        return gradwire.shm.teams(dist.group.WORLD)

    with Hosts(ranks) as hosts:
        found = run_ranks(teams, sum(ranks), hosts=hosts)
        assert [len(team) for team in found[0]] == list(ranks)
        assert found == [found[0]] * sum(ranks)
        for body in ("blocks of different sizes", "averages and bits", "messages", "objects"):
            run_ranks(BODIES[body], sum(ranks), hosts=hosts, timeout=100.0)


BY_NAME = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def exact(rank, count, dtype):
    """Small integers: their sums are exact in each of the dtypes."""
    return ((torch.arange(count) * (rank + 3)) % 13 - 6).to(dtype)


def reduced_by(world, count, dtype, op):
    stacked = torch.stack([exact(rank, count, dtype).double() for rank in range(world)])
    found = stacked.amax(0) if op == "max" else stacked.sum(0)
    return (found / world if op == "avg" else found).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", BY_NAME)
@pytest.mark.on_ranks(2)
def test_reductions_in_pieces(dtype, op):
    """In shared memory, where shares are cut that do not stay in a core's cache."""
    rank, count = dist.get_rank(), 2 * (reduction._UNCUT_BYTES // dtype.itemsize + 333)
    mine, expected = exact(rank, count, dtype), reduced_by(2, count, dtype, op)
    tensor, part = gradwire.shm.empty(count, dtype=dtype), torch.empty(count // 2, dtype=dtype)
    dist.reduce_scatter_tensor(part, tensor.copy_(mine), BY_NAME[op])
    assert torch.equal(part, expected.chunk(2)[rank])
    dist.all_reduce(tensor.copy_(mine), BY_NAME[op])
    assert torch.equal(tensor, expected)
    dist.reduce(tensor.copy_(mine), 1, BY_NAME[op])
    assert torch.equal(tensor, expected if rank == 1 else mine)


def reduce_through(number, count):
    """Reductions of ordinary tensors whose ranks all ask for one ring."""
    world, float32, chosen = dist.get_world_size(), torch.float32, meeting.ring_for
    meeting.ring_for = lambda *_, **__: number
    try:
        rank = dist.get_rank()
        tensor, whole = exact(rank, count, float32), reduced_by(world, count, float32, "sum")
        dist.all_reduce(tensor)
        assert torch.equal(tensor, whole)
        tensor.copy_(exact(rank, count, float32))
        dist.reduce(tensor, world - 1)
        assert torch.equal(tensor, whole if rank == world - 1 else exact(rank, count, float32))
        each = count // world
        out = torch.empty(each)
        dist.reduce_scatter_tensor(out, exact(rank, each * world, float32))
        assert torch.equal(out, whole[rank * each :][:each])
    finally:
        meeting.ring_for = chosen
    return list(shm_backend_of(dist.group.WORLD).state._staging)


@pytest.mark.parametrize("number", range(len(RINGS)))
def test_reductions_pass_through_every_ring(number):
    """Which one the ranks ask for goes by the machine's cores; here it is used more than once."""
    ring = RINGS[number]
    count = ring.slots * ring.slot_bytes // 4 + 333
    for used in run_ranks(reduce_through, 3, backend="shm", args=(number, count)):
        assert used == [number]


def numbers(rank, count):
    return torch.arange(float(count)) + 10 * rank


def gathered(have, expected, root, group=None):
    """Whether what each rank has came to the root as it expects it."""
    rank = dist.get_rank()
    into = [torch.zeros(count) for count in expected] if rank == root else None
    dist.gather(numbers(rank, have[rank]), into, root, group=group)
    return into is None or all(torch.equal(x, numbers(r, len(x))) for r, x in enumerate(into))


def scattered(expected, have, root, group=None):
    """Whether each rank got what the root has for it."""
    rank = dist.get_rank()
    blocks = [numbers(r, count) for r, count in enumerate(have)] if rank == root else None
    out = torch.zeros(expected[rank])
    dist.scatter(out, blocks, root, group=group)
    return torch.equal(out, numbers(rank, len(out)))


def all_sizes(sizes):
    size, moved, refused = dist.get_world_size(), 0, []
    tables = list(product(sizes, repeat=size))
    for root, call in product(range(size), (gathered, scattered)):
        for ranks, of_root in product(tables, tables):
            if ranks == of_root:
                assert call(ranks, of_root, root), (call, ranks, of_root)
                moved += 1
            else:
                with pytest.raises(MismatchError) as caught:
                    call(ranks, of_root, root)
                refused.append(str(caught.value))
    return moved, refused


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.wide)])
def test_every_combination_of_sizes(size):
    """The largest is beyond what travels with headers."""
    sizes = [0, 3, 90_000 if size < 3 else 2]
    first, *others = run_ranks(all_sizes, size, backend="shm", timeout=60, args=(sizes,))
    assert all(other == first for other in others)  # the same errors everywhere
    moved, refused = first
    assert moved == 2 * size * 3**size
    assert len(refused) == 2 * size * (9**size - 3**size)
    assert all("number of elements: rank" in text for text in refused)
