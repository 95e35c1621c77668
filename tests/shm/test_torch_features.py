"""Features of torch that use process groups run on shm as on Gloo."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))


def own_batch():
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(4, 8)


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


def averaged(net):
    """What every rank's gradients become, one all_reduce each."""
    net(own_batch()).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    return gradients(net)


def trained(wrapper):
    net = network()
    expected = averaged(copy.deepcopy(net))
    model = wrapper(net, bucket_cap_mb=0.2)
    for _ in range(3):
        model.zero_grad()
        model(own_batch()).square().mean().backward()
        torch.testing.assert_close(gradients(net), expected)


def compiled(net, bucket_cap_mb):
    torch._dynamo.reset()
    return torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager")


@pytest.mark.parametrize(
    ("wrapper", "world", "options"),
    [
        (nn.parallel.DistributedDataParallel, 2, {}),
        (nn.parallel.DistributedDataParallel, 3, {}),
        (compiled, 2, {}),
        (nn.parallel.DistributedDataParallel, 4, {"hosts": (2, 2)}),
        (DistributedDataParallel, 4, {"hosts": (2, 2)}),
    ],
)
def test_data_parallel_training(wrapper, world, options):
    options = options or {"backend": "shm"}
    run_ranks(trained, world, timeout=100, args=(wrapper,), **options)


@pytest.mark.on_ranks(2)
def test_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = network()
    expected = averaged(copy.deepcopy(net))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(own_batch()).square().mean().backward()
    got = [p.grad.full_tensor() for p in net.parameters()]
    torch.testing.assert_close(got, expected)


@pytest.mark.on_ranks(2)
def test_functional_collectives():
    from torch.distributed import _functional_collectives as ops

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = torch.full((4, 3), float(rank))
    total = float(sum(range(world)))
    assert ops.all_reduce(x, "sum", group).eq(total).all()
    assert ops.all_gather_tensor(x, 0, group)[:, 0].tolist() == [
        float(r) for r in range(world) for _ in range(4)
    ]
    wide = torch.full((4 * world, 3), float(rank))
    assert ops.reduce_scatter_tensor(wide, "sum", 0, group).eq(total).all()
    first, second = ops.all_reduce_coalesced([x, wide], "sum", group)
    assert first.eq(total).all()
    assert second.eq(total).all()
    assert ops.broadcast(x, world - 1, group).eq(world - 1).all()
    moved = ops.all_to_all_single(wide, [4] * world, [4] * world, group)
    assert moved[:, 0].tolist() == [float(r) for r in range(world) for _ in range(4)]


@pytest.mark.wide
@pytest.mark.parametrize("body", [test_fsdp2, test_functional_collectives])
def test_over_two_hosts(body):
    run_ranks(body, 4, hosts=(2, 2), timeout=60)


@pytest.mark.on_ranks(2)
def test_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(12.0).view(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its storages
        dcp.save({"x": distribute_tensor(x, mesh, [Shard(0)])}, checkpoint_id=str(tmp_path))
        state = {"x": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])}
        dcp.load(state, checkpoint_id=str(tmp_path))
    torch.testing.assert_close(state["x"].full_tensor(), x)


# -- compiled code behaves as on Gloo, with and without graph breaks


def waited(x):
    dist.all_reduce(x, async_op=True).wait()


def gathered(x):
    pieces = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(pieces, x)
    x.copy_(pieces[1])


def sent(x):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)


INSIDE = {
    "all_reduce": dist.all_reduce,
    "asynchronous": waited,
    "barrier": lambda x: dist.barrier(),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": gathered,
    "send and recv": sent,
}


def all_compiled():
    for name, call in INSIDE.items():

        def function(x, call=call):
            call(x)
            return x * 2

        torch._dynamo.reset()
        own = torch.arange(6.0) + 10 * dist.get_rank()
        expected = function(own.clone())
        result = torch.compile(function, backend="eager")(own.clone())
        if name == "reduce" and dist.get_rank() == 1:
            continue  # what the others are left with is not said
        torch.testing.assert_close(result, expected, msg=name)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_functions_with_a_collective_inside(backend):
    run_ranks(all_compiled, backend=backend, timeout=100)
