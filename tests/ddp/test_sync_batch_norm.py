"""SyncBatchNorm beside torch.nn.BatchNorm on the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def whole_batch(count, dims, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, *(2, 4, 3)[: dims - 2])
    x, cotangent = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return (5 + x).to(dtype), cotangent.to(dtype)


OPTIONS = [
    {},
    {"affine": False},
    {"bias": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 0.5, "dtype": torch.float32},
]


@pytest.mark.parametrize(
    ("samples", "dims"), [((3, 1), 4), ((2, 2), 2), ((1, 4, 0), 3), ((2, 3), 5)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_the_whole_batch(samples, dims, options):
    def main():
        rank, dtype = dist.get_rank(), options.get("dtype", torch.float64)
        given = {"dtype": dtype, **options}
        layer = SyncBatchNorm(3, **given)
        if not given.pop("bias", True):
            assert layer.bias is None
            given["affine"] = True
        twin = PLAIN[dims](3, **given)
        for _ in range(3):
            whole, cotangent = whole_batch(sum(samples), dims, dtype)
            whole.requires_grad_()
            own = whole.detach().split(samples)[rank].clone().requires_grad_()
            out, expected = layer(own), twin(whole)
            assert out.dtype == dtype
            out.backward(cotangent.split(samples)[rank])
            expected.backward(cotangent)
            torch.testing.assert_close(out, expected.split(samples)[rank])
            torch.testing.assert_close(own.grad, whole.grad.split(samples)[rank])
        for name, p in layer.named_parameters():
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, twin.get_parameter(name).grad)
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffer, twin.get_buffer(name))
        x = whole.detach().split(samples)[0]
        torch.testing.assert_close(layer.eval()(x), twin.eval()(x))

    run_ranks(main, len(samples))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_low_precision_keeps_its_statistics_in_float32(dtype):
    layer, twin = SyncBatchNorm(3), nn.BatchNorm1d(3)
    whole, _ = whole_batch(8, 2, dtype)
    out = layer(whole.chunk(2)[dist.get_rank()])
    assert out.dtype == dtype
    torch.testing.assert_close(out, twin(whole.float()).to(dtype).chunk(2)[dist.get_rank()])
    torch.testing.assert_close(layer.running_var, twin.running_var)


@on_ranks(2)
def test_second_derivatives():
    rank = dist.get_rank()
    layer, twin = SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    whole, cotangent = whole_batch(4, 2, torch.float64)
    whole.requires_grad_()
    own = whole.detach().chunk(2)[rank].clone().requires_grad_()
    seconds = []
    for module, x, v in ((layer, own, cotangent.chunk(2)[rank]), (twin, whole, cotangent)):
        (first,) = torch.autograd.grad((module(x) * v).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(seconds[0], seconds[1].chunk(2)[rank])


@pytest.mark.narrow({"each_backend": "shm"})
@on_ranks(3)
def test_a_group_of_some_ranks_and_copies():
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[dist.get_rank() > 0]
    layer = SyncBatchNorm(3, process_group=group).double()
    whole, _ = whole_batch(6, 3, torch.float64)
    twin = nn.BatchNorm1d(3).double()
    expected = twin(whole[:2] if dist.get_rank() == 0 else whole[2:])
    own = whole.chunk(3)[dist.get_rank()]
    for module in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer):
        assert module.process_group is group
        place = max(dist.get_rank() - 1, 0)
        torch.testing.assert_close(module(own), expected.split(2)[place])
    with pytest.raises(ArgumentError, match="does not contain this rank"):
        SyncBatchNorm(3, process_group=dist.GroupMember.NON_GROUP_MEMBER)


@on_ranks(2)
def test_conversion_trains_as_one_process():
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4)
    twin = nn.Sequential(nn.Linear(3, 4), shared, nn.Tanh(), nn.Linear(4, 4), shared)
    net = copy.deepcopy(twin)
    weight = net[1].weight
    converted = SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    assert type(net[1]) is SyncBatchNorm
    assert net[1] is net[4]
    assert net[1].weight is weight
    wrapped = DistributedDataParallel(net)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, twin)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        whole = torch.randn(6, 3, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(whole.chunk(2)[dist.get_rank()]).cos().mean().backward()
        twin(whole).cos().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


@pytest.mark.parametrize("each_backend", ["shm"], indirect=True)
def test_conversion_of_other_layers_and_wrong_arguments(each_backend):
    old = nn.BatchNorm2d(3, momentum=None, affine=False, track_running_stats=False).eval()
    new = SyncBatchNorm.convert_sync_batchnorm(old)
    assert (new.momentum, new.affine, new.track_running_stats, new.training) == (None, *[False] * 3)
    again = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(2), nn.Tanh()))
    assert type(again[0]) is SyncBatchNorm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of lazy modules
        bare = {"affine": False, "track_running_stats": False}
        lazy = [nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(affine=False), nn.LazyBatchNorm1d(**bare)]
    for layer in lazy:
        with pytest.raises(ArgumentError, match="no shape yet"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer))
        layer(torch.randn(4, 3))
        converted = SyncBatchNorm.convert_sync_batchnorm(layer)
        x = torch.randn(4, 3)
        torch.testing.assert_close(converted(x), layer(x))
    with pytest.raises(ArgumentTypeError, match="process_group is 3"):
        SyncBatchNorm(3, process_group=3)
    layer, twin = SyncBatchNorm(3), nn.BatchNorm1d(3)  # without a group, as batch norm
    x = whole_batch(4, 2, torch.float32)[0]
    torch.testing.assert_close(layer(x), twin(x))
    with pytest.raises(ArgumentError, match=r"shape \(4, 2\)"):
        layer(torch.ones(4, 2))


@on_ranks(2)
def test_too_few_values():
    own = torch.ones(1 - dist.get_rank(), 3)
    with pytest.raises(ArgumentError, match="1 values for each channel"):
        SyncBatchNorm(3)(own)


@on_ranks(2, timeout=30)
def test_a_hook_of_several_collectives_on_the_same_group():
    """Its later collectives are sent from callbacks, in the same order on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), SyncBatchNorm(6)) for _ in range(4)]
    net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-4)
    net.register_comm_hook(None, hooks.BlockQuantization(8))
    for _ in range(20):
        x = torch.randn(4, 6) + dist.get_rank()
        (net(x) + net(x + 1)).square().mean().backward()
