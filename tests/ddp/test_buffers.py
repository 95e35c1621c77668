"""Buffers: which ones are synchronized, when, and what graphs have saved of them."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Scaled(nn.Module):
    """A linear layer whose result is multiplied by a buffer, which forward changes."""

    def __init__(self, *, view=False, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.view = nn.Linear(2, 2), view
        base = torch.ones(4)
        self.register_buffer("scale", base[:2] if shared else torch.ones(2))
        if shared:
            self.register_buffer("other", base[2:])

    def forward(self, x):
        out = self.layer(x)
        return out * (self.scale.view(1, 2) if self.view else self.scale)


def average(buffers, group):
    means = [b.div_(group.size()) for b in buffers.values() if b.is_floating_point()]
    return [dist.all_reduce(b, group=group, async_op=True).get_future() for b in means]


# -- which ones ----------------------------------------------------------------------------


@on_ranks(2)
def test_buffers_that_come_and_go_between_steps():
    rank = dist.get_rank()
    net = DistributedDataParallel(Scaled())
    net(torch.ones(1, 2)).sum().backward()
    net.module.register_buffer("late", torch.full((2,), float(rank)))
    net.module.register_buffer("absent", None)
    net(torch.ones(1, 2)).sum().backward()
    late = net.module.late.tolist()
    net.module.late = None
    del net.module.absent
    net(torch.ones(1, 2)).sum().backward()
    net.module.late = torch.full((1,), 5.0 + rank)
    net(torch.ones(1, 2)).sum().backward()
    assert (late, net.module.late.item()) == ([0.0, 0.0], 5.0)
    net = DistributedDataParallel(Scaled(), forward_sync_buffers=False)
    net.module.scale.fill_(rank)
    net(torch.ones(1, 2)).sum().backward()
    assert net.module.scale.tolist() == [rank, rank]


def test_expanded_and_inference_buffers():
    """They take rank 0's values when the module is wrapped, and in each forward."""
    values = {
        "expanded": lambda r: torch.full((1, 3), 1.0 + r).expand(4, 3),
        "large": lambda r: torch.full((1, 700_000), 1.0 + r).expand(2, 700_000),
    }

    def make(name, rank):
        if name.startswith("inference"):
            with torch.inference_mode():
                return torch.full((1,) if "expanded" in name else (3,), 1.0 + rank).expand(3)
        return values[name](rank)

    def main(inference):
        rank = dist.get_rank()
        module = nn.Linear(1, 1)
        names = [*values, "inference", "inference_expanded"]
        for name in names:
            module.register_buffer(name, make(name, rank))
        net = DistributedDataParallel(module)
        for again in (False, True):
            if again:
                for name in names:
                    setattr(module, name, make(name, rank))
                with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
                    net(torch.ones(1, 1))
            for name in names:
                buffer, want = getattr(module, name), make(name, 0)
                assert buffer.shape == want.shape
                assert torch.equal(buffer, want), name
                assert buffer.is_inference() == want.is_inference(), name

    for inference in (False, True):
        run_ranks(main, 2, args=(inference,))


@pytest.mark.parametrize("convert", ["to_mkldnn", "to_sparse", "to_sparse_csr"])
@on_ranks(2)
def test_a_buffer_that_cannot_be_sent_is_named(convert):
    module = nn.Linear(2, 2)
    module.register_buffer("packed", getattr(torch.ones(4, 4), convert)())
    with pytest.raises(ArgumentError, match=r"packed has layout torch\.\w+, which"):
        DistributedDataParallel(module)


# -- two forwards of one backward ----------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_graph_keeps_the_buffer_that_it_has_saved(view, hooked):
    """Rank 0 changes its buffer between two forwards of one backward."""
    net = DistributedDataParallel(Scaled(view=view))
    if hooked:
        net.register_buffer_hook(average)
    buffer, x = net.module.scale, torch.ones(1, 2)
    for _ in range(2):
        net.zero_grad()
        outputs = [net(x)]
        if dist.get_rank() == 0:
            net.module.scale = net.module.scale + 1
        outputs += [net(x), net(x)]
        sum(outputs).sum().backward()
        if dist.get_rank():
            assert net.module.scale is buffer  # whoever has it has the new values
    scale, total = (2.0, 1.5 + 2 * 2.0) if hooked else (3.0, 2.0 + 2 * 3.0)
    assert (net.module.scale.tolist(), net.module.layer.bias.grad.tolist()) == (
        [scale, scale],
        [total, total],
    )


@on_ranks(2)
def test_a_graph_keeps_a_buffer_that_was_replaced_before():
    net, x = DistributedDataParallel(Scaled()), torch.ones(1, 2)
    net.module.scale = torch.full((2,), 2.0 + dist.get_rank())
    nn.BatchNorm1d(2)  # any new buffer makes the wrapper look for its own ones again
    first = net.module(x)  # sends no buffers
    (first + net(x)).sum().backward()
    assert net.module.scale.tolist() == [2.0, 2.0]
    assert net.module.layer.bias.grad.tolist() == [4.5, 4.5]


@on_ranks(2)
def test_a_saved_buffer_in_shared_memory_is_an_error():
    """It can neither be replaced, as another buffer is in the same memory, nor be overwritten."""
    net, x = DistributedDataParallel(Scaled(shared=True)), torch.ones(1, 2)
    first = net(x)
    if dist.get_rank() == 0:
        net.module.scale = torch.full((2,), 4.0)
    loss = (first + net(x)).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|interrupted"):
        loss.backward()
    net(x).sum().backward()


def test_two_forwards_through_a_batch_norm(same_as_one_process):
    """Its running statistics are saved by the graph, and backward does not use them."""
    statistics = []

    def program(net, rank, step):
        xs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(step)) + rank
        sum((net(x) * x).sum() for x in xs).backward()

    def check(net):
        statistics.append(net.module[1].running_mean)
        assert statistics[0] is statistics[-1]

    near = {"rtol": 1e-4, "atol": 1e-4}
    model = partial(nn.Sequential, nn.Linear(3, 3), nn.BatchNorm1d(3))
    same_as_one_process(program, model=model, check=check, **near)


def kept_in(place):
    def keep(module):
        view = module.scale.view(1, 2)
        module.cache = {"attribute": view, "list": [view], "object": SimpleNamespace(view=view)}[
            place
        ]
        return view

    return keep


@pytest.mark.parametrize("place", ["attribute", "list", "object"])
@on_ranks(2)
def test_a_view_that_a_module_keeps_sees_new_values(place):
    net, x = DistributedDataParallel(Scaled()), torch.ones(1, 2)
    net(x).sum().backward()
    view = kept_in(place)(net.module)
    for step in range(3):
        if dist.get_rank() == 0:
            net.module.scale.fill_(2.0 + step)
        net(x).sum().backward()
        assert view.tolist() == [net.module.scale.tolist()] == [[2.0 + step] * 2]


@on_ranks(2)
def test_a_buffer_that_is_swapped():
    net, x = DistributedDataParallel(Scaled()), torch.ones(1, 2)
    for step in range(3):
        net(x).sum().backward()
        new = torch.full((2,), 1.0 + step + dist.get_rank())
        torch.utils.swap_tensors(net.module.scale, new)
        outputs = [net(x), net(x)]
        assert net.module.scale.tolist() == [1.0 + step] * 2
        sum(outputs).sum().backward()


# -- evaluation ----------------------------------------------------------------------------


def step(net, rank):
    net(torch.randn(4, 3) + rank).square().sum().backward()


def evaluate(net):
    net.eval()
    with torch.no_grad():
        out = net(torch.ones(2, 3))
        assert torch.equal(net(torch.ones(2, 3)), out)
    net.train()


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("in_eval", [True, False])
def test_one_rank_evaluates_alone(alone, in_eval):
    """What it sends then, the others receive in their next training forward."""

    def main():
        rank = dist.get_rank()
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        net = DistributedDataParallel(module, sync_buffers_in_eval=in_eval)
        twin = copy.deepcopy(net.module)
        for number in range(4):
            if rank == alone and number != 2:
                evaluate(net)
            if not in_eval:
                dist.barrier()
            step(net, rank)
        if rank == 0:
            torch.manual_seed(0)
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            for _ in range(4):
                twin(torch.randn(4, 3))
            torch.testing.assert_close(net.module[1].running_mean, twin[1].running_mean)
        net.eval()
        with torch.no_grad():
            return net(torch.ones(2, 3)).tolist()

    first, *others = run_ranks(main, 3)
    assert all(other == first for other in others) == in_eval


@on_ranks(1)
def test_a_wrapper_that_is_collected_while_a_module_is_built():
    """PyTorch loops over its hooks then: a hook that is removed would end the loop by an error."""
    gc.disable()
    register = nn.modules.module.register_module_module_registration_hook
    handle = register(lambda *_: gc.collect() * 0 or None)  # before those of the wrapper
    try:
        net = DistributedDataParallel(nn.BatchNorm1d(2))
        net.itself = [net]
        gone = weakref.ref(net)
        del net
        nn.Sequential(nn.Linear(2, 2))
    finally:
        handle.remove()
        gc.enable()
    assert gone() is None
