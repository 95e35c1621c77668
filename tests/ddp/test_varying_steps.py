"""Steps that differ from earlier ones: their gradients are averaged, or an error says why not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel, Reducer
from gradwire.errors import DistributedError

pytestmark = pytest.mark.usefixtures("each_backend")
OPTIONS = [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0}]


class Net(nn.Module):
    """Four layers, of which a forward takes those it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, use=range(4), run=lambda layer, x: layer(x)):
        for i in use:
            x = run(self.layers[i], x).tanh()
        return x


def squares(net, x):
    return net(x).square().sum()


def batch(rank, step):
    return torch.full((2, 4), (1.0 + rank + step) / 2)


# -- one kind of step after another: gradients are those of one process -------------------------


def cleared_in_part(net, rank, x):
    squares(net, x).backward()
    net.module.layers[1].zero_grad()
    net.module.layers[3].weight.grad = None
    squares(net, x).backward()


def local_before(net, rank, x):
    """A backward without a forward stays local, and is averaged with the next."""
    (net.module.layers[0].weight.square().sum() * (1 + rank)).backward()
    squares(net, x).backward()


def used_by_the_loss(net, rank, x):
    """The last layer is only used in the loss, where its gradients come first."""
    last = net.module.layers[3]
    (net(x, use=[0, 1, 2]).sum() * last.weight.sum() * last.bias.sum()).backward()


def past_the_outputs(net, rank, x, use=(3, 2, 1, 0, 0)):
    """The loss is of the last layer's input: no output of the module takes part."""
    found = []
    last = net.module.layers[use[-1]]
    handle = last.register_forward_pre_hook(lambda _, given: found.extend(given))
    net(x, use)
    handle.remove()
    found[-1].square().sum().backward()


def frozen_and_past_the_outputs(net, rank, x):
    net.module.layers[0].requires_grad_(False)
    past_the_outputs(net, rank, x, use=(0, 3, 2, 1, 1))


def by_autograd_grad(net, rank, x):
    out = net(x.requires_grad_()).sum()
    torch.autograd.grad(out, [x, net.module.layers[0].weight], retain_graph=True)
    assert all(p.grad is None for p in net.parameters())
    out.backward()


def in_parts(net, rank, x, order=1):
    """Two parts of the module, the second of which does not reach the first."""
    out = net(x, use=[0, 1])
    head = net.module.layers[3](net.module.layers[2](out.detach()).tanh())
    for part in (out, head)[::order]:
        part.square().sum().backward()


def head_first(net, rank, x):
    in_parts(net, rank, x, order=-1)


def frozen(net, rank, x, ranks=(0, 1)):
    net.module.layers[1].requires_grad_(rank not in ranks)
    squares(net, x).backward()
    net.module.layers[1].requires_grad_(True)


def frozen_after_the_forward(net, rank, x, ranks=(0, 1)):
    loss = squares(net, x)
    net.module.layers[1].requires_grad_(rank not in ranks)
    loss.backward()
    net.module.layers[1].requires_grad_(True)


PROGRAMS = [
    cleared_in_part,
    local_before,
    used_by_the_loss,
    past_the_outputs,
    frozen_and_past_the_outputs,
    by_autograd_grad,
    in_parts,
    head_first,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_after_others(program, same_as_one_process):
    def run(net, rank, step):
        if step in (3, 4):
            program(net, rank, batch(rank, step))
        else:
            squares(net, batch(rank, step)).backward()

    same_as_one_process(run, model=Net, steps=6)


@pytest.mark.parametrize("options", [*OPTIONS, {"static_graph": True}])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("program", [frozen, frozen_after_the_forward])
def test_parameters_frozen_on_some_ranks(program, ranks, options, same_as_one_process):
    """The fuzzer's models have frozen ones with other options, and with hooks."""

    def run(net, rank, step):
        if step in (2, 3):
            program(net, rank, batch(rank, step), ranks)
        else:
            squares(net, batch(rank, step)).backward()

    same_as_one_process(run, options=options, model=Net, steps=5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", [range(1, 4), range(1)])
def test_one_loss_of_a_forward_and_one_under_no_sync(first, options, same_as_one_process):
    """What the second brings before backward reaches the first one's output takes part."""

    def program(net, rank, step):
        x = batch(rank, step)
        if step < 3:
            loss = squares(net, x)
        else:
            ours = net(x, first)
            with net.no_sync():
                loss = ours.square().sum() + squares(net, 2 * x)
        loss.backward()

    same_as_one_process(program, options=options, model=Net, steps=5)


@pytest.mark.parametrize("options", OPTIONS)
def test_no_sync_after_a_forward_without_a_backward(options, same_as_one_process):
    """What it accumulates is sent later, on a rank that expects another backward, too."""

    def program(net, rank, step):
        x = batch(rank, step)
        if rank == 0:
            net(x)  # only to look at it
        with net.no_sync():
            squares(net, 2 * x).backward()
        squares(net, x).backward()

    same_as_one_process(program, options=options, model=Net, steps=4)


KEEP = [lambda g: g, lambda g: g.detach(), lambda g: g.numpy(), lambda g: g[0]]


def test_kept_gradients_do_not_change(same_as_one_process):
    kept = []

    def program(net, rank, step):
        squares(net, batch(rank, step)).backward()

    def check(net):
        assert all(torch.equal(torch.as_tensor(held), value) for held, value in kept)
        keep = KEEP[len(kept) // 8 % len(KEEP)]
        found = [keep(p.grad) for p in net.parameters()]
        kept.extend((held, torch.as_tensor(held).clone()) for held in found)

    same_as_one_process(program, model=Net, steps=10, check=check)


@on_ranks(2)
def test_a_user_hook_registered_between_steps():
    net, found = DistributedDataParallel(nn.Linear(1, 1)), []
    x = torch.tensor([[1.0 + dist.get_rank()]])
    for step in range(5):
        net.zero_grad()
        net(x).sum().backward()
        weight, bias = (p.grad.item() for p in net.parameters())
        assert (weight, bias) == ((3.0, 3.0) if step > 2 else (1.5, 1.0))
        if step == 2:
            weight, bias = net.parameters()
            weight.register_hook(lambda g, w=weight: found.append(w.grad) or 2 * g)
            bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 3 * p.grad))
    assert found == [None] * 2


class Trunk(nn.Module):
    """A large layer with two small ones on it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(128, 128)
        self.heads = nn.ModuleList(nn.Linear(128, 2) for _ in range(2))

    def forward(self, x):
        x = self.trunk(x)
        return [head(x).sum() for head in self.heads]


@on_ranks(2)
def test_a_large_gradient_that_arrives_twice_is_an_error():
    net = DistributedDataParallel(Trunk())
    x = torch.ones(2, 128)
    for _ in range(3):
        net.zero_grad()
        sum(net(x)).backward()
    net.zero_grad()
    first, second = net(x)
    first.backward(retain_graph=True)
    with pytest.raises(DistributedError, match=r"trunk\.(weight|bias).* twice"):
        second.backward()


@pytest.mark.narrow({"each_backend": "shm"})
@on_ranks(2)
def test_a_reducer_without_outputs_keeps_its_hooks():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    named = [(str(i), p) for i, p in enumerate(parameters)]
    reducer = Reducer(named, dist.group.WORLD)
    for _ in range(4):
        for p in parameters:
            p.grad = None
        reducer.prepare()
        (torch.stack([*parameters]).sum() * (1 + dist.get_rank())).backward()
    assert [p.grad.tolist() for p in parameters] == [[1.5, 1.5]] * 3
