"""Wrong arguments are refused before anything is sent, and the group stays usable."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import gradwire.shm
from gradwire import collectives as C
from gradwire._torch import PYTHON_BACKENDS
from gradwire.errors import ArgumentError, ArgumentTypeError, DistributedError, NotSupportedError
from gradwire.shm.register import shm_backend_of


def mistakes():
    """Calls that all ranks get wrong alike, and their errors."""
    # the methods themselves: torch 2.15's own face refuses some before it calls them
    world, group = dist.get_world_size(), shm_backend_of(dist.group.WORLD)
    with FakeTensorMode():
        fake = torch.ones(3)
    x, overlapping = torch.ones(4), torch.ones(1).expand(4)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    short = torch.ones(4, dtype=torch.uint16)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    average = dist.AllreduceOptions()
    average.reduceOp = dist.ReduceOp.AVG
    return [
        (lambda: group.allreduce([None]), ArgumentTypeError, "NoneType"),
        (lambda: group.allreduce([torch.ones(3, device="meta")]), NotSupportedError, "meta"),
        (lambda: group.allreduce([fake]), ArgumentTypeError, "FakeTensor"),
        (
            lambda: torch.vmap(lambda t: group.allreduce([t]) and t)(x),
            ArgumentTypeError,
            "vmap.*collectives",
        ),
        (lambda: group.allreduce([nested]), ArgumentError, "nested|layout"),
        (lambda: dist.all_reduce(overlapping), ArgumentError, "share memory.*clone"),
        (lambda: dist.broadcast(overlapping, 0), ArgumentError, "share memory"),
        (lambda: dist.all_gather([overlapping] * world, x), ArgumentError, "share memory"),
        (lambda: group.recv([overlapping], 1 - dist.get_rank()), ArgumentError, "share memory"),
        (
            lambda: group.all_to_all_single(overlapping, x, [], []),
            ArgumentError,
            "share memory",
        ),
        (
            lambda: group.reduce_scatter_single(torch.ones(1).expand(2), x),
            ArgumentError,
            "share memory",
        ),
        (
            lambda: group.all_gather_single_coalesced([torch.ones(8)], [x, x]),
            ArgumentError,
            "1 outputs for 2 inputs",
        ),
        (lambda: group.allgather_coalesced([[x, x]], [x, x]), ArgumentError, "1 outputs"),
        (lambda: dist.all_reduce(freed), ArgumentError, "no memory.*freed"),
        (lambda: dist.all_gather_into_tensor(torch.ones(8), freed), ArgumentError, "no memory"),
        (lambda: group.send([freed], 1 - dist.get_rank()), ArgumentError, "no memory"),
        (lambda: group.recv([freed], 1 - dist.get_rank()), ArgumentError, "no memory"),
        (
            lambda: group.allreduce([torch._efficientzerotensor(4)]),
            ArgumentError,
            "without memory|share memory",
        ),
        (lambda: dist.all_reduce(short), ArgumentError, "uint16 cannot be reduced by SUM"),
        (
            lambda: group.allreduce([torch.ones(3, dtype=torch.complex32)], average),
            ArgumentError,
            "complex64",
        ),
        (
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
            ArgumentError,
            "AVG needs floating point",
        ),
        (lambda: dist.all_reduce(x, dist.ReduceOp.BOR), ArgumentError, "works on integers"),
        (lambda: group.reduce([x.to_sparse()]), ArgumentError, "layout"),
        (lambda: group.alltoall([x] * 2, [short] * 2), ArgumentTypeError, "one dtype"),
        (lambda: gradwire.shm.empty((2, -3)), ArgumentError, r"\(2, -3\)"),
        (lambda: gradwire.shm.empty(-1), ArgumentError, r"\(-1,\)"),
        (lambda: gradwire.shm.empty(2.5), ArgumentTypeError, r"2\.5"),
        (lambda: gradwire.shm.empty("a"), ArgumentTypeError, "'a'"),
        (lambda: gradwire.shm.empty(2, dtype="f"), ArgumentTypeError, "torch.dtype"),
        (lambda: gradwire.shm.empty(1 << 61), DistributedError, "not enough memory"),
        (lambda: group.send([x], 1 - dist.get_rank(), 2**40), ArgumentError, "32 bits"),
    ]


@pytest.mark.on_ranks(2)
def test_mistakes_are_refused_and_the_group_goes_on():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its prototypes
        calls = mistakes()
    for number, (call, error, message) in enumerate(calls):
        with pytest.raises(error, match=message):
            call()
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2], number


def mistakes_of_gradwires_collectives():
    """Calls that one rank gets wrong, beside the right call of the others."""
    x, sparse = torch.ones(4), torch.eye(2).to_sparse()
    meta, tiny = torch.ones(4, device="meta"), torch.ones(4).to(torch.float8_e4m3fn)
    strided = [(C.all_reduce, "sum"), (C.reduce, 0), (C.all_gather, 0), (C.gather, 0)]
    strided += [(C.reduce_scatter, "sum"), (C.all_to_all,), (C.broadcast, 0)]
    for op, *args in strided:
        right = partial(op, x, *args)
        bad = [sparse, "x", None, torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)]
        bad.append(torch.nested.nested_tensor([x, x]))
        # receivers of a broadcast may have nothing but a shape; torch 2.15 skips all calls with it
        if op is not C.broadcast and not PYTHON_BACKENDS:
            bad.append(meta)
        if op in (C.all_reduce, C.reduce, C.reduce_scatter):
            bad.append(tiny)
        for y in bad:
            yield right, partial(op, y, *args)
    for op, good, wrong in (
        (C.all_reduce, {}, {"op": "band"}),
        (C.broadcast, {"src": 0}, {"src": 9}),
        (C.gather, {"dst": 0}, {"dst": 0, "sizes": [1, 1]}),
        (C.all_gather, {}, {"dim": 3}),
        (C.all_gather, {}, {"sizes": [1, 2, 3]}),
        (C.all_to_all, {}, {"input_splits": [1, 1]}),
    ):
        yield partial(op, x, **good), partial(op, x, **wrong)
    asynchronous = partial(C.all_reduce, async_op=True)
    yield (lambda: asynchronous(x).wait()), partial(asynchronous, tiny)


@pytest.mark.filterwarnings("ignore")  # torch's, of its prototypes
@pytest.mark.on_ranks(2)
def test_a_rank_that_was_refused_is_in_step_with_the_others():
    for right, wrong in mistakes_of_gradwires_collectives():
        for rank in (0, 1):
            if dist.get_rank() == rank:
                with pytest.raises((ArgumentError, ArgumentTypeError, NotSupportedError)):
                    wrong()
            right()
            right()


@pytest.mark.on_ranks(2)
def test_zeros_without_memory_are_sent():
    """What autograd gives for a derivative that is zero can be sent, and not written."""
    for count in (3, 200_000):
        zeros, got = torch._efficientzerotensor(count), torch.ones(2 * count)
        dist.all_gather_into_tensor(got, zeros)
        assert not got.any()
        if dist.get_rank() == 0:
            dist.send(zeros, 1)
        else:
            dist.recv(got[:count].fill_(1), 0)
            assert not got.any()


@pytest.mark.skipif(PYTHON_BACKENDS, reason="this torch makes the other half: test_backend.py")
@pytest.mark.on_ranks(2)
def test_a_group_for_cuda_too_carries_cpu_tensors_and_says_what_to_do_for_others():
    """A Python group is the whole group to torch: no CUDA half, whatever was asked for."""
    group = dist.new_group(backend="cpu:shm,cuda:nccl")
    assert gradwire.shm.shares_memory(group)
    other = torch.ones(3, device="cuda" if torch.cuda.is_available() else "meta")
    for call in (
        lambda: dist.all_reduce(other, group=group),
        lambda: dist.broadcast(other, 0, group=group),
        lambda: dist.all_gather_into_tensor(torch.empty(6), other, group=group),
        lambda: dist.reduce_scatter_tensor(other[:1], other[:2], group=group),
        lambda: dist.all_to_all_single(torch.empty_like(other[:2]), other[:2], group=group),
        lambda: dist.send(other, 1 - dist.get_rank(), group=group),
        lambda: dist.recv(other, 1 - dist.get_rank(), group=group),
    ):
        with pytest.raises(NotSupportedError, match=r"new_group\(backend='nccl'\)"):
            call()
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3


@pytest.mark.on_ranks(2)
def test_a_dtensor_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    refusal = NotImplementedError if PYTHON_BACKENDS else ArgumentTypeError
    with pytest.raises(refusal, match=r"to_local|sharding"):
        dist.all_reduce(sharded)
    dist.all_reduce(sharded.to_local())
    assert sharded.full_tensor().tolist() == [2.0, 4.0, 2.0, 4.0]


@pytest.mark.on_ranks(2)
def test_tensors_of_inference_mode():
    """Tensors of inference mode, inside and outside of it, and what comes after."""
    peer = 1 - dist.get_rank()
    with torch.inference_mode():
        short, long = torch.ones(3, dtype=torch.int8), torch.ones(100_000)
        dist.all_reduce(short)
        dist.all_reduce(long)  # the staging memory is made here, and used outside
        inside = gradwire.shm.empty(4).fill_(1.0)
    for x in (short, long):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    receive = dist.irecv(long, peer)
    dist.send(torch.full((100_000,), 5.0), peer)
    receive.wait()
    for x in (torch.ones(3, dtype=torch.int8), torch.ones(100_000), inside):
        dist.all_reduce(x)
        assert x.unique().tolist() == [2]
    assert short.tolist() == [8] * 3
    assert long.unique().tolist() == [5.0]
