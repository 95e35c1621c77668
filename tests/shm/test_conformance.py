"""Every operation gives the results of Gloo and of a single process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from benchmarks.hosts import Hosts, why_no_hosts

import gradwire.shm
from gradwire._torch import PYTHON_BACKENDS, is_done
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SIZES = [0, 1, 17, 9_000, 300_001]  # with the header, and through the slots in several pieces
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX


def value(rank, count, dtype, salt=0):
    """Small whole numbers that differ between ranks, places and blocks; sums are exact."""
    numbers = torch.arange(count) * 7 + rank * 3 + salt
    return (numbers % 5).to(dtype)


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def reduced(values, op):
    stacked = torch.stack(values).double()
    result = {SUM: stacked.sum(0), MIN: stacked.amin(0), MAX: stacked.amax(0)}[op]
    return result.to(values[0].dtype)


def new(count, dtype, inside):
    return gradwire.shm.empty(count, dtype=dtype) if inside else torch.empty(count, dtype=dtype)


def reductions(inside, sizes=SIZES):
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS + INTEGERS:
        for count in sizes:
            values = [value(r, count, dtype) for r in range(world)]
            for op in (SUM, MIN, MAX):
                expected = reduced(values, op)
                x = new(count, dtype, inside).copy_(values[rank])
                dist.all_reduce(x, op)
                equal(x, expected)
                x.copy_(values[rank])
                root = world - 1
                dist.reduce(x, root, op)
                if rank == root:
                    equal(x, expected)


def scattered():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in SIZES[1:]:
            inputs = [[value(r, count, dtype, s) for s in range(world)] for r in range(world)]
            expected = reduced([inputs[r][rank] for r in range(world)], SUM)
            for inside in (False, True):
                whole = new(count * world, dtype, inside)
                out = new(count, dtype, inside)
                dist.reduce_scatter_tensor(out, whole.copy_(torch.cat(inputs[rank])))
                equal(out, expected)
                out.zero_()
                dist.reduce_scatter(out, list(whole.chunk(world)))
                equal(out, expected)


def moved(sizes=SIZES):
    rank, world = dist.get_rank(), dist.get_world_size()
    more = [torch.bool, torch.complex64] if dist.get_backend() == "shm" else []
    for dtype in [*FLOATS, *INTEGERS, *more]:
        for count in sizes[1:]:
            values = [value(r, count, dtype) for r in range(world)]
            for inside in (False, True):
                own = new(count, dtype, inside).copy_(values[rank])
                whole = new(count * world, dtype, inside).zero_()
                dist.all_gather_into_tensor(whole, own)
                equal(whole, torch.cat(values))
                into = [torch.zeros(count, dtype=dtype) for _ in range(world)]
                dist.all_gather(into, own)
                equal(torch.stack(into), torch.stack(values))
                for root in {0, world - 1}:
                    x = own.clone() if not inside else own.copy_(values[rank])
                    dist.broadcast(x, root)
                    equal(x, values[root])
                    own.copy_(values[rank])
                    gathered = [torch.zeros(count, dtype=dtype) for _ in range(world)]
                    dist.gather(own, gathered if rank == root else None, root)
                    if rank == root:
                        equal(torch.stack(gathered), torch.stack(values))
                    x = torch.zeros(count, dtype=dtype)
                    dist.scatter(x, values if rank == root else None, root)
                    equal(x, values[rank])


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


def broadcast_between_places():
    rank, world = dist.get_rank(), dist.get_world_size()
    for inside in itertools.product([False, True], repeat=world):
        for count in (9_000, 300_001):
            for root in {0, world - 1}:
                x = new(count, torch.float32, inside[rank]).copy_(value(rank, count, torch.float32))
                dist.broadcast(x, root)
                equal(x, value(root, count, torch.float32))


def exchanged():
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in SIZES[1:]:
        blocks = [[value(r, count, torch.float32, s) for s in range(world)] for r in range(world)]
        for inside in (False, True):
            source = new(count * world, torch.float32, inside).copy_(torch.cat(blocks[rank]))
            out = new(count * world, torch.float32, inside).zero_()
            dist.all_to_all_single(out, source)
            equal(out, torch.cat([blocks[r][rank] for r in range(world)]))
        rows = [r % 3 + s for s in range(world) for r in [rank]]
        cols = [s % 3 + rank for s in range(world)]
        source = torch.full((sum(rows), count), float(rank))
        out = torch.zeros(sum(cols), count)
        dist.all_to_all_single(out, source, cols, rows)
        equal(out, torch.cat([torch.full((n, count), float(s)) for s, n in enumerate(cols)]))


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


def strided():
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (4, 300):
        x = torch.full((count, count), float(rank)).t()
        x[0, 1] = 10.0 + rank
        wide = torch.zeros(count, 2 * count)
        part = wide[:, ::2].copy_(x)
        dist.all_reduce(part)
        expected = torch.full((count, count), float(sum(range(world))))
        expected[0, 1] += 10.0 * world
        equal(part, expected)
        equal(wide[:, 1::2], torch.zeros(count, count))
        leaf = torch.ones(count, requires_grad=True)
        before = leaf._version
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf._version > before


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


@pytest.mark.on_ranks(4)
def test_groups_and_subgroups():
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [[0, 1], [2, 3]]
    mine = [dist.new_group(ranks) for ranks in pairs][rank // 2]
    cross = dist.new_group([1, 3], backend="shm")
    for count in (3, 90_000):
        x, y = torch.full((count,), float(rank)), torch.full((count,), float(rank))
        first = dist.all_reduce(x, group=mine, async_op=True)
        dist.all_reduce(y)
        first.wait()
        equal(x, torch.full((count,), float(sum(pairs[rank // 2]))))
        equal(y, torch.full((count,), float(sum(range(world)))))
        if rank % 2:
            dist.broadcast(x, 3, group=cross)
            equal(x, torch.full((count,), 5.0))
    dist.destroy_process_group(mine)
    dist.barrier()


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


BETWEEN_HOSTS = [0, 17, 100_001]  # with the header, and in pieces
# function, arguments, and arguments over hosts
BODIES = {
    "reductions": (reductions, (False,), (False, BETWEEN_HOSTS)),
    "reductions of shared memory": (reductions, (True,), (True, BETWEEN_HOSTS)),
    "reduce_scatter": (scattered, (), ()),
    "movement": (moved, (), (BETWEEN_HOSTS,)),
    "broadcast of a list": (streamed, (), ()),
    "broadcast between places": (broadcast_between_places, (), ()),
    "all_to_all": (exchanged, (), ()),
    "blocks of different sizes": (listed, (), ()),
    "any strides": (strided, (), ()),
    "averages and bits": (averaged, (), ()),
    "messages": (messages, (), ()),
    "several in flight": (in_flight, (), ()),
    "objects": (objects, (), ()),
}
OF_GLOO = ["reductions", "reductions of shared memory", "reduce_scatter", "movement"]
OF_GLOO += ["all_to_all", "messages", "objects"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("backend", "body"), [("shm", b) for b in BODIES] + [("gloo", b) for b in OF_GLOO]
)
@pytest.mark.narrow({"backend": "shm", "world": [1, 2, 3]}, {"backend": "gloo", "world": 2})
def test_on_one_host(backend, body, world):
    if body == "messages" and world == 1:
        pytest.skip("a rank sends nothing to itself")
    function, args, _ = BODIES[body]
    run_ranks(function, world, backend=backend, timeout=20.0, args=args)


@pytest.mark.parametrize("hosts", [(2, 2), (1, 3), (3, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.narrow(
    {"hosts": (2, 2), "body": "several in flight"},
    {"hosts": (1, 3), "body": "blocks of different sizes"},
    {"hosts": (2, 1, 1), "body": "messages"},
)
def test_over_hosts(body, hosts):
    function, _, args = BODIES[body]
    run_ranks(function, sum(hosts), hosts=hosts, timeout=100.0, args=args)


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
            function, _, args = BODIES[body]
            run_ranks(function, sum(ranks), hosts=hosts, timeout=100.0, args=args)
