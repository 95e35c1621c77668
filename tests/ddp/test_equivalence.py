"""DistributedDataParallel gives the gradients of the whole batch, with the same bits everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import on_ranks
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


MODELS = {"mlp": mlp, "large": large}
"""tests/fuzz draws others, with parameters of other kinds and in several places."""


def loss_of(net, x):
    return net(x).square().mean()


def gradients_of(net):
    return {n.removeprefix("module."): p.grad.clone() for n, p in net.named_parameters()}


def compare(name, world_size, options):
    """Ours after three steps, held against the whole batch, and torch's."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # replicas start apart: construction must make them equal
    net = MODELS[name]()
    ours = DistributedDataParallel(net, **options)
    alone, theirs = (copy.deepcopy(net) for _ in range(2))
    theirs = nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=False)
    torch.manual_seed(7)
    for _ in range(3):
        batch = torch.randn(4 * world_size, 6)
        own = batch[4 * rank : 4 * rank + 4]
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, own).backward()
        alone.zero_grad()
        loss_of(alone, batch).backward()
        got = gradients_of(ours)
        for reference in (alone, theirs):
            for n, expected in gradients_of(reference).items():
                torch.testing.assert_close(got[n], expected, rtol=2e-4, atol=1e-6, msg=n)
        with torch.no_grad():
            for model in (ours, theirs, alone):
                for p in model.parameters():
                    p -= 0.1 * p.grad
    return {n: g.tolist() for n, g in got.items()}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-3}]
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_whole_batch(name, options):
    first, second = run_ranks(compare, 2, args=(name, 2, options))
    assert first == second  # the same bits


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks(world_size):
    results = run_ranks(compare, world_size, args=("mlp", world_size, {"bucket_cap_mb": 1e-3}))
    assert all(r == results[0] for r in results)


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


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_gradients_kept_by_zero_grad(view):
    """zero_grad(set_to_none=False): backward adds to what is there, bucket views included."""
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=view)
    x = torch.full((2, 6), float(dist.get_rank() + 1))
    seen = []
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        loss_of(net, x).backward()
        seen.append([p.grad.clone() for p in net.parameters()])
    for again in seen[1:]:
        for a, b in zip(seen[0], again, strict=True):
            torch.testing.assert_close(a, b)
    storages = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(storages) == (1 if view else 6)


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
def test_unreferenced_buffers_are_reused():
    net = DistributedDataParallel(nn.Linear(200, 200, bias=False))
    places = []
    for step in range(4):
        net.zero_grad(set_to_none=step % 2 == 0)
        loss_of(net, torch.ones(1, 200)).backward()
        places.append(net.module.weight.grad.data_ptr())
    assert len(set(places[2:])) == 1


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
