"""DistributedDataParallel gives the gradients of the whole batch, with the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import assert_same_on_ranks, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    return nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 2)
    )


def large():
    """Two gradients that travel in place (≥ 4 MiB), with smaller ones around them."""
    return nn.Sequential(
        nn.Linear(6, 1024), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1030)
    )


class Named(torch.Tensor):
    """Nothing but a class: what PyTorch computes from it is of the class, too."""

    def new_empty(self, *size, **options):  # for copies
        return super().new_empty(*size, **options).as_subclass(Named)


def subclass():
    net = large()
    net[1].weight = nn.Parameter(net[1].weight.detach().as_subclass(Named))
    return net


def loss_of(net, x):
    return net(x).square().mean()


@pytest.mark.parametrize(
    ("model", "ranks", "options"),
    [
        (mlp, 1, {"bucket_cap_mb": 1e-3}),
        (mlp, 3, {"gradient_as_bucket_view": True}),
        (large, 2, {}),
        (large, 2, {"gradient_as_bucket_view": True}),
        (large, 2, {"bucket_cap_mb": 1e-3}),
        (subclass, 2, {}),
    ],
)
def test_gradients_of_the_whole_batch(model, ranks, options, same_as_one_process):
    """The fuzzer draws models with parameters of other kinds."""

    def made():
        torch.manual_seed(dist.get_rank())  # replicas start apart: construction makes them equal
        return model()

    def program(net, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss_of(net, torch.randn(4, 6, generator=generator)).backward()

    def check(net):
        assert_same_on_ranks([p.grad.as_subclass(torch.Tensor) for p in net.parameters()])
        if model is mlp and ranks == 3:  # views of one bucket
            assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters()}) == 1

    near = {"rtol": 2e-4, "atol": 1e-6}
    same_as_one_process(program, ranks, options, model=made, check=check, **near)


def test_no_sync_that_is_not_enabled_has_no_effect():
    def main():
        net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        x, found = torch.tensor([[1.0 + dist.get_rank()]]), []
        for outer, inner in [(True, False), (False, True), (False, False)]:
            with net.no_sync(enabled=outer), net.no_sync(enabled=inner):
                net(x).sum().backward()
            found.append(net.module.weight.grad.item())
        return found

    assert run_ranks(main, 2) == [[1.0, 2.0, 4.5], [2.0, 4.0, 4.5]]


def test_in_place_gradients_are_not_copied():
    def main():
        net = DistributedDataParallel(large())
        for _ in range(2):
            net.zero_grad()
            loss_of(net, torch.randn(4, 6)).backward()
        return net.reducer.buckets

    for buckets in run_ranks(main, 2, backend="gloo"):  # on shm they are packed
        assert ["1.weight"] in buckets
        assert ["3.weight"] in buckets


@on_ranks(2)
def test_a_gradient_with_other_strides_than_its_parameter():
    net = DistributedDataParallel(nn.Linear(1100, 1000, bias=False))
    transposed = torch.full((1100, 1000), float(dist.get_rank())).t()
    net.module.weight.grad = transposed if dist.get_rank() else transposed.contiguous()
    x = torch.zeros(1, 1100)
    net(x).sum().backward()  # adds zeros
    assert net.module.weight.grad.unique().tolist() == [0.5]


@on_ranks(2)
def test_buckets_are_rebuilt_in_the_order_of_rank_0():
    class Backwards(nn.Module):
        """Uses its layers in the order opposite to their registration."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    net = DistributedDataParallel(Backwards(), bucket_cap_mb=1e-6)
    before = net.reducer.buckets
    for _ in range(2):
        net.zero_grad()
        loss_of(net, torch.randn(2, 6)).backward()
    names = [[f"layers.{i}.weight"] for i in range(4)]
    assert (before, net.reducer.buckets) == (names[::-1], names)


@on_ranks(2)
def test_the_wrapper_can_be_dropped():
    module = mlp()
    for _ in range(2):
        net = DistributedDataParallel(module)
        loss_of(net, torch.randn(2, 6)).backward()
        del net
    sent = dist.group.WORLD._get_sequence_number_for_group()
    loss_of(module, torch.randn(2, 6)).backward()
    hooks = [len(p._post_accumulate_grad_hooks or {}) for p in module.parameters()]
    assert (dist.group.WORLD._get_sequence_number_for_group() - sent, max(hooks)) == (0, 0)


@on_ranks(2)
def test_evaluation_between_forward_and_backward():
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    loss = net(torch.randn(3, 4)).square().sum()
    net.eval()
    with torch.no_grad():
        net(torch.randn(3, 4))
    loss.backward()
