"""States of hooks, saved and loaded with DDP and with LocalSGD."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch import nn

from gradwire import DistributedDataParallel, hooks
from gradwire.errors import NotSavedWarning
from gradwire.local_sgd import LocalSGD

pytestmark = pytest.mark.usefixtures("each_backend")


class Remembering:
    """State of a hook, with its own generator."""

    def __init__(self):
        self.noise, self.sums = torch.Generator().manual_seed(dist.get_rank()), {}

    def state_dict(self):
        return {
            "noise": self.noise.get_state(),
            "sums": {n: s.clone() for n, s in self.sums.items()},
        }

    def load_state_dict(self, saved):
        self.noise.set_state(saved["noise"])
        self.sums = dict(saved["sums"])


def remembering(state, bucket):
    """Average with noise, and what was sent before."""
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        gradient += torch.rand(gradient.shape, generator=state.noise)
        gradient += state.sums.setdefault(name, torch.zeros_like(gradient))
        state.sums[name] += 0.1 * gradient
    return hooks.all_reduce(None, bucket)


class OneOf(Remembering):
    """State whose bits depend on which parameters share a bucket."""

    depends_on_buckets = True


def with_ddp(net, state):
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    wrapped.register_comm_hook(state, remembering)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return wrapped, sgd, wrapped.comm_hook_state_dict, wrapped.load_comm_hook_state_dict


def with_local_sgd(net, state):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = LocalSGD(sgd, net, every=2, fragments=2, hook=remembering, hook_state=state)
    return net, optimizer, optimizer.state_dict, optimizer.load_state_dict


def step(net, optimizer, number):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    net(torch.randn(4, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    return [p.tolist() for p in net.parameters()]


@pytest.mark.parametrize(("made", "kind"), [(with_ddp, OneOf), (with_local_sgd, Remembering)])
@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit(made, kind):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    net, optimizer, save, _ = made(network(), kind())
    file, history = io.BytesIO(), []
    for number in range(9):
        history.append(step(net, optimizer, number))
        if number == 4:
            torch.save((net.state_dict(), save()), file)
    file.seek(0)
    values, saved = torch.load(file, weights_only=True)
    again, resumed, _, load = made(network(), kind())
    again.load_state_dict(values)
    load(saved)
    for number in range(5, 9):
        assert step(again, resumed, number) == history[number], number


@on_ranks(1)
def test_a_state_without_state_dict_is_a_warning():
    net = nn.Linear(2, 2)
    _, _, save, _ = with_local_sgd(net, object())
    with pytest.warns(NotSavedWarning, match="a object, is not saved"):
        assert save()["hook"] == {}
