"""Parameters of subclasses of Tensor are broadcast and reduced as plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import NotSupportedError

pytestmark = pytest.mark.usefixtures("each_backend")
OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


class Named(Tensor):
    """Nothing but a class: what PyTorch computes from it is of the class, too."""


KINDS = {
    "plain": lambda t: t,
    "named": lambda t: t.as_subclass(Named),
    "wrapper": WrapperSubclass,
}


class Net(nn.Module):
    def __init__(self, kind, size):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.weight = nn.Parameter(KINDS[kind](torch.randn(size, 2) / size))
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return torch.tanh(x @ self.weight) + self.bias


def plain(t):
    return t.a if isinstance(t, WrapperSubclass) else t.as_subclass(Tensor)


def train(kind, size, options):
    net = DistributedDataParallel(Net(kind, size), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 2 * size).view(2, size) * (dist.get_rank() + step + 1)
        net(x).square().sum().backward()
        found += [plain(p.grad).clone() for p in net.parameters()]
        optimizer.step()
    return [*found, *(plain(p.detach()).clone() for p in net.parameters())]


@pytest.mark.parametrize("kind", ["named", "wrapper"])
@on_ranks(2)
def test_subclasses_train_as_plain_parameters(kind):
    for size in (4, 5_000, 700_000):  # each travels in its own way
        for options in OPTIONS[: None if size < 10_000 else 1]:
            torch.testing.assert_close(train(kind, size, options), train("plain", size, options))


@on_ranks(2)
def test_a_subclass_of_several_tensors_is_refused_by_name():
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(NotSupportedError, match=r"parameter weight is a TwoTensor that holds"):
        DistributedDataParallel(net)
    net.weight.requires_grad_(False)
    net.weight.a.fill_(dist.get_rank())
    DistributedDataParallel(net)
    assert not net.weight.a.any()
