"""Parameters that are unused on some or all ranks, in some or all steps."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.common import assert_average, on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import PeerFailedError, ReductionError

pytestmark = pytest.mark.usefixtures("each_backend")
SMALL, UNUSED = {"bucket_cap_mb": 1e-6}, {"find_unused_parameters": True}


class Layers(nn.Module):
    """Layers, of which a forward takes those it is given: it may be given none."""

    def __init__(self, width=4, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x, take):
        for i in take:
            x = self.layers[i](x).tanh()
        return x * 2


def batch(rank, step=0, width=4):
    return torch.full((2, width), (1.0 + rank + step) / width, requires_grad=True)


TAKES = [
    *([[0], [0]], [[0, 1], [1]], [[2], [0, 1, 2]], [[0], [2]], [[1], [1]]),
    *([[], [0, 1]], [[1], []], [[], []], [[0], [1]], [[], [0]]),  # none on a rank
]
"""The layers that each rank takes in a step."""


@pytest.mark.parametrize("hook", [None, "all_reduce"])
@pytest.mark.parametrize("options", [{}, SMALL, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("width", [4, 1100])
def test_control_flow_that_depends_on_rank_and_step(width, options, hook, same_as_one_process):
    """A rank that uses no parameter takes part with zeros, in each backward of its outputs."""

    def program(net, rank, step):
        for i in range(step, step + 1 + (step == 8)):  # one adds to the gradients of another
            loss = net(batch(rank, i, width), TAKES[i][rank]).square().sum()
            loss.backward(retain_graph=True)
            if i == 6:
                loss.backward()

    options, model = {**options, **UNUSED}, partial(Layers, width)
    same_as_one_process(program, 2, options, hook, model=model, steps=9)


@pytest.mark.parametrize("takes", [[[0], [0, 1]], [[0], [0]], [[], []]])
@pytest.mark.parametrize("last", [[[0], [0]], [[], [1]]])
def test_use_within_no_sync_counts(last, takes, same_as_one_process):
    """What only an accumulating step used takes part in the step that reduces."""

    def program(net, rank, step):
        with net.no_sync():
            net(batch(rank, step), takes[rank]).sum().backward()
        net(batch(rank, step), last[rank]).sum().backward()

    same_as_one_process(program, options=UNUSED, model=Layers)


@on_ranks(2)
def test_use_within_no_sync_that_was_cleared_does_not_count():
    net = DistributedDataParallel(Layers(), **UNUSED)
    x = torch.ones(2, 4)
    with net.no_sync():
        net(x, [0, 1]).sum().backward()
    net.zero_grad()
    net(x, [0]).sum().backward()
    assert [layer.weight.grad is None for layer in net.module.layers] == [False, True, True]


@on_ranks(2)
def test_outputs_that_the_loss_leaves_out():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return {"a": self.a(x), "b": [self.b(x)]}

    net = DistributedDataParallel(Heads(), **UNUSED)
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


@on_ranks(2)
def test_a_module_that_returns_the_output_of_an_inner_one():
    class Outer(Layers):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, take):
            x = self.inner(x, [0])
            return super().forward(x, take) if take else x

    twin = Outer(Layers())
    net = copy.deepcopy(twin)
    net.inner = DistributedDataParallel(net.inner, **UNUSED)
    inner = [f"inner.{name}" for name, _ in net.inner.named_parameters()]
    net._ddp_params_and_buffers_to_ignore = inner
    net = DistributedDataParallel(net, **UNUSED)
    rank = dist.get_rank()
    for model in (net, twin):
        model(batch(rank), [0, 1] if rank else []).square().sum().backward()
    assert_average(net, twin)


@on_ranks(2)
def test_two_modules_and_a_loss_that_uses_parameters():
    """A gradient that comes before the outputs' on one rank does not change the order there."""
    modules = [Layers(60, 2), Layers(60, 2)]
    nets = [DistributedDataParallel(m, **UNUSED, **SMALL) for m in modules]
    twins, rank = copy.deepcopy(modules), dist.get_rank()
    for step in range(2):
        for models, inner in ((nets, modules), (twins, twins)):
            loss = inner[0].layers[0].weight.square().sum()
            outputs = [m(batch(rank, step, 60), [0, 1] if rank else [1]) for m in models]
            (loss + sum(h.square().sum() for h in outputs)).backward()
        for net, twin in zip(nets, twins, strict=True):
            assert_average(net, twin)
        for model in (*nets, *twins):
            model.zero_grad()


class Whole(Layers):
    """The graph of the outputs has no parameters: what is unused shows when backward ends."""

    def forward(self, x, take):
        return checkpoint(super().forward, x, take, use_reentrant=True)


@pytest.mark.parametrize("take", [[[0], [0]], [[], [0, 1]]])
def test_a_reentrant_checkpoint_around_all_layers(take, same_as_one_process):
    def program(net, rank, step):
        net(batch(rank, step), take[rank]).sum().backward()

    same_as_one_process(program, 2, UNUSED, model=Whole, steps=2)


@pytest.mark.parametrize("take", [[[], [0]], [[1], [0, 1]]])
def test_a_repeated_backward_in_which_the_loss_uses_parameters(take, same_as_one_process):
    """On a rank where only the loss uses it, its gradient comes before the outputs'."""

    def program(net, rank, step):
        loss = net(batch(rank, step), take[rank]).sum()
        loss = loss + net.module.layers[0].weight.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    same_as_one_process(program, 2, UNUSED, model=Layers)


@on_ranks(2)
def test_backwards_without_parameters_send_nothing():
    """On a rank that uses nothing as on others: gradients of inputs, and of frozen modules."""
    net, take = DistributedDataParallel(Layers(), **UNUSED), [[], [0, 1]][dist.get_rank()]
    x, other = batch(dist.get_rank()), torch.ones(4, requires_grad=True)
    before = dist.group.WORLD._get_sequence_number_for_group()
    out = net(x, take).sum()
    torch.autograd.grad(out, x, retain_graph=True, create_graph=True)
    between = x * other
    out = net(between, take).sum()
    torch.autograd.grad(out, between, retain_graph=True)
    out.backward(inputs=[x], retain_graph=True)
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    out.backward()
    assert net.module.layers[0].weight.grad.any()
    before = dist.group.WORLD._get_sequence_number_for_group()
    net.requires_grad_(False)
    net(batch(dist.get_rank()), [0, 1]).sum().backward()
    assert dist.group.WORLD._get_sequence_number_for_group() == before


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
    net = DistributedDataParallel(Layers(), static_graph=True)
    x = torch.ones(1, 4)
    for take in ([0, 1], [0, 1]):
        net(x, take).sum().backward()
    with pytest.raises(ReductionError, match=r"layers\.2\..*static_graph"):
        net(x, [0, 1, 2]).sum().backward()
    net(x, [0, 1]).sum().backward()  # counted again
    net(x, [0, 1]).sum().backward()
    net(x, [0]).sum().backward()
    with pytest.raises(ReductionError, match=r"\['layers\.1\.weight', 'layers\.1\.bias'\]"):
        net(x, [0, 1])
    net(x, [0, 1]).sum().backward()


@on_ranks(2)
def test_a_reentrant_checkpoint_where_parameters_may_be_unused_names_the_remedy():
    net = DistributedDataParallel(Checkpointed(), **UNUSED)
    with pytest.raises((ReductionError, PeerFailedError), match="use_reentrant=False"):
        net(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_skip_all_reduce_unused_params():
    options = {**UNUSED, **SMALL, "skip_all_reduce_unused_params": True}
    net = DistributedDataParallel(Layers(), **options)
    x, sent = torch.ones(1, 4), []
    for take in ([0, 1, 2], [0, 1, 2], [0], [0]):
        net.zero_grad()
        if len(sent) == 3:
            with net.no_sync():
                (net(x, [1]) * dist.get_rank()).sum().backward()
        before = dist.group.WORLD._get_sequence_number_for_group()
        net(x, take).sum().backward()
        sent.append(dist.group.WORLD._get_sequence_number_for_group() - before)
        assert net.module.layers[2].weight.grad is None or len(take) > 1
    assert sent[2] < sent[3] < sent[1]
    assert net.module.layers[1].bias.grad.any()  # accumulated before, on rank 1


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
