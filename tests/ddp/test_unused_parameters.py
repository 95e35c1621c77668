"""Parameters that are unused on some or all ranks, in some or all steps."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import assert_average, on_ranks
from gradwire import collectives as C
from gradwire.ddp import DistributedDataParallel, SyncBatchNorm
from gradwire.errors import PeerFailedError, ReductionError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")
SMALL = {"bucket_cap_mb": 1e-6}


class Branches(nn.Module):
    """A trunk and three branches, of which a forward takes those it is given."""

    def __init__(self, width=4):
        super().__init__()
        self.trunk = nn.Linear(4, width)
        self.branches = nn.ModuleList(nn.Linear(width, 2) for _ in range(3))

    def forward(self, x, take):
        x = self.trunk(x).tanh()
        return sum(self.branches[i](x) for i in take)


def batch(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step))


class Between(nn.Module):
    """Ranks use one of two layers between two that exchange cotangents."""

    def __init__(self, exchange):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.exchange = exchange or SyncBatchNorm(6)
        self.either = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, take):
        x = self.either[take](self.first(x)).tanh()
        return self.last(self.exchange(x))


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("exchange", [None, C.all_reduce])
@on_ranks(2, timeout=60)
def test_layers_that_some_ranks_use_beside_other_collectives(exchange, options):
    net = DistributedDataParallel(Between(exchange), **SMALL, **options)
    twin = copy.deepcopy(net.module)
    for step in range(3):
        take = 0 if "static_graph" in options else step
        for module in (net, twin):
            module.zero_grad()
            module(batch(dist.get_rank()), (dist.get_rank() + take) % 2).square().mean().backward()
        assert_average(net, twin)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("options", [{}, SMALL])
@pytest.mark.parametrize("width", [4, 1100])
def test_control_flow_that_depends_on_rank_and_step(options, view, width, same_as_one_process):
    takes = [[[0], [0]], [[0, 1], [1]], [[2], [0, 1, 2]], [[0], [2]], [[1], [1]]]

    def program(net, rank, step):
        net(batch(rank, step), takes[step][rank]).square().mean().backward()

    options = {**options, "find_unused_parameters": True, "gradient_as_bucket_view": view}
    same_as_one_process(program, options=options, model=partial(Branches, width), steps=5)


def test_parameters_unused_on_all_ranks_keep_their_gradient():
    def main(view):
        net = DistributedDataParallel(
            Branches(300), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        x = torch.full((1, 4), dist.get_rank() + 1.0)
        net(x, [0, 1]).sum().backward()
        kept = [p.grad.clone() for p in net.module.branches[1].parameters()]
        for _ in range(2):  # gradients are not cleared
            net(x, [0]).sum().backward()
            for p, old in zip(net.module.branches[1].parameters(), kept, strict=True):
                assert torch.equal(p.grad, old)
        return [p.grad is None for p in net.module.branches[2].parameters()]

    for view in (False, True):
        assert run_ranks(main, 3, args=(view,)) == [[True, True]] * 3


def test_unused_parameters_are_logged_by_name():
    class Keep(logging.Handler):
        def __init__(self):
            super().__init__()
            self.texts = []

        def emit(self, record):
            self.texts.append(record.getMessage())

    def main():
        logger, keep = logging.getLogger("gradwire.ddp"), Keep()
        logger.setLevel(logging.DEBUG)
        logger.addHandler(keep)
        net = DistributedDataParallel(Branches(), find_unused_parameters=True)
        net(torch.ones(1, 4), [0, 1] if dist.get_rank() else [0, 2]).sum().backward()
        logger.removeHandler(keep)
        logger.setLevel(logging.NOTSET)
        return keep.texts

    assert run_ranks(main, 2) == [
        [f"step 1: unused here: ('branches.{i}.weight', 'branches.{i}.bias')"] for i in (1, 2)
    ]


def test_use_within_no_sync_counts(same_as_one_process):
    """What only an accumulating step used takes part in the step that reduces."""

    def program(net, rank, step):
        x = batch(rank, step)
        with net.no_sync():
            net(x, [0, 1] if rank else [0]).sum().backward()
        net(x, [0]).sum().backward()

    same_as_one_process(program, options={"find_unused_parameters": True}, model=Branches)


@on_ranks(2)
def test_use_within_no_sync_that_was_cleared_does_not_count():
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x = torch.ones(2, 4)
    with net.no_sync():
        net(x, [0, 1]).sum().backward()
    net.zero_grad()
    net(x, [0]).sum().backward()
    assert [branch.weight.grad is None for branch in net.module.branches] == [False, True, True]


@on_ranks(2)
def test_outputs_that_the_loss_leaves_out():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return {"a": self.a(x), "b": [self.b(x)]}

    net = DistributedDataParallel(Heads(), find_unused_parameters=True)
    for _ in range(3):
        net.zero_grad()
        out = net(torch.full((1, 4), dist.get_rank() + 1.0))
        out["a"].sum().backward()
        assert net.module.b.weight.grad is None
        assert net.module.a.weight.grad.unique().tolist() == [1.5]
        out["b"][0].sum().backward()  # the other one, later
        assert net.module.b.weight.grad.unique().tolist() == [1.5]
        assert net.module.a.weight.grad.unique().tolist() == [1.5]
    assert net.logging_data().unused == ("a.weight", "a.bias")


# -- static graphs -------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Reentrant checkpoints, one of which runs the same layer again; and an unused layer."""

    def __init__(self, reentrant=True):
        super().__init__()
        self.first, self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("options", [{}, SMALL, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("reentrant", [False, True])
def test_static_graph_with_checkpoints_and_no_sync(reentrant, options, same_as_one_process):
    """PyTorch's DDP ends in an internal assertion where no_sync meets static_graph."""

    def program(net, rank, step):
        with net.no_sync():
            net(batch(rank, step)).square().mean().backward()
        net(batch(rank, step + 5)).square().mean().backward()

    def check(net):
        assert net.logging_data().unused == ("unused.weight", "unused.bias")
        layout.append(net.reducer.buckets)
        assert len(layout) < 2 or all("unused.weight" not in names for names in layout[-1])

    layout = []
    model, options = partial(Checkpointed, reentrant), {**options, "static_graph": True}
    same_as_one_process(program, options=options, model=model, steps=4, check=check)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}])
def test_two_backwards_in_the_first_step_of_a_static_graph(options, same_as_one_process):
    """The second goes by the first: how often each gradient comes is known by then."""

    def program(net, rank, step):
        losses = [net(batch(rank, step + i)).square().mean() for i in (0, 5)]
        for loss in losses:
            loss.backward()

    options = {**options, "static_graph": True}
    same_as_one_process(program, options=options, model=Checkpointed)


@on_ranks(2)
def test_a_gradient_of_inputs_on_one_rank_in_the_first_step_of_a_static_graph():
    """It is that rank's own: nothing is sent for it, which others would take for what they send."""
    net = DistributedDataParallel(nn.Linear(4, 2), static_graph=True)
    x = torch.ones(2, 4, requires_grad=True)
    y = net(x)
    y.square().sum().backward(retain_graph=True)
    if dist.get_rank() == 0:
        assert torch.autograd.grad(y.sum(), x)[0].any()
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == 2.0


class Uses(nn.Module):
    """Uses parameters by name, each time in a reentrant checkpoint: an arrival of its own."""

    def __init__(self, sizes):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(n)) for n in sizes)

    def forward(self, x, take):
        for name in take:
            x = checkpoint(self.once, x, name, use_reentrant=True)
        return x

    def once(self, x, name):
        p = getattr(self, name)
        return x + (p * torch.arange(1.0, len(p) + 1)).mean() * x.detach()


@pytest.mark.parametrize("sizes", [(20_000, 100), (1_200_000, 100), (100, 20_000), (9_000, 20_000)])
@pytest.mark.parametrize("takes", [("b", "ab"), ("a", "ab"), ("aa", "a"), ("ab", "ba")])
@pytest.mark.parametrize("view", [False, True])
def test_static_graph_with_large_gradients_used_differently_by_rank(
    sizes, takes, view, same_as_one_process
):
    """What a rank uses must not decide where gradients lie in a bucket, which ranks add up."""

    def program(net, rank, step):
        x = torch.ones(1, requires_grad=True) * (step + 1.0 + rank)
        net(x, takes[rank]).sum().backward()

    options = {"static_graph": True, "gradient_as_bucket_view": view}
    same_as_one_process(program, options=options, model=partial(Uses, sizes))


@on_ranks(1)
def test_a_graph_that_is_not_static_is_named():
    net = DistributedDataParallel(Branches(), static_graph=True)
    x = torch.ones(1, 4)
    for take in ([0, 1], [0, 1]):
        net(x, take).sum().backward()
    with pytest.raises(ReductionError, match=r"branches\.2\..*static_graph"):
        net(x, [0, 1, 2]).sum().backward()
    net(x, [0, 1]).sum().backward()  # counted again
    net(x, [0, 1]).sum().backward()
    net(x, [0]).sum().backward()
    with pytest.raises(ReductionError, match=r"\['branches\.1\.weight', 'branches\.1\.bias'\]"):
        net(x, [0, 1])
    net(x, [0, 1]).sum().backward()


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=True)


@on_ranks(2)
def test_a_reentrant_checkpoint_where_parameters_may_be_unused_names_the_remedy():
    net = DistributedDataParallel(Once(), find_unused_parameters=True)
    with pytest.raises((ReductionError, PeerFailedError), match="use_reentrant=False"):
        net(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_skip_all_reduce_unused_params():
    net = DistributedDataParallel(
        Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, **SMALL
    )
    x, sent = torch.ones(1, 4), []
    for take in ([0, 1, 2], [0, 1, 2], [0], [0]):
        net.zero_grad()
        if len(sent) == 3:
            with net.no_sync():
                (net(x, [1]) * dist.get_rank()).sum().backward()
        before = dist.group.WORLD._get_sequence_number_for_group()
        net(x, take).sum().backward()
        sent.append(dist.group.WORLD._get_sequence_number_for_group() - before)
        assert net.module.branches[2].weight.grad is None or len(take) > 1
    assert sent[2] < sent[3] < sent[1]
    assert net.module.branches[1].bias.grad.tolist() == [0.5, 0.5]  # accumulated before


@on_ranks(2)
def test_buckets_are_not_rebuilt_where_parameters_may_be_unused():
    """As in PyTorch: programs rely on it."""
    net = nn.ModuleDict({"late": nn.Linear(2, 2), "early": nn.Linear(2, 2)})
    net.forward = lambda x: net["late"](net["early"](x))
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6, find_unused_parameters=True)
    planned = model.reducer.buckets
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2))
    assert not model.logging_data().rebuilt
    assert model.reducer.buckets == planned
