"""States of hooks without `state_dict`, saved and loaded with DDP and with LocalSGD."""

from __future__ import annotations

import copy
import io
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from gradwire import DistributedDataParallel, hooks
from gradwire.errors import NotSavedWarning
from gradwire.local_sgd import LocalSGD
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


class Remembering:
    """State of a hook without state_dict: nested data, generators, a group, and more."""

    def __init__(self):
        self.process_group = dist.group.WORLD
        self.kept = {"sums": [torch.zeros(2)], "seen": set()}
        self.by_index = {}
        self.noise = torch.Generator().manual_seed(dist.get_rank())
        self.draws = np.random.RandomState(3)
        self.scale = None


def remembering(state, bucket):
    """Average with noise, and keep errors by bucket and by name, which must be saved."""
    buffer = bucket.buffer()
    buffer += torch.rand(len(buffer), generator=state.noise) * float(state.draws.rand())
    buffer += state.kept["sums"][0].sum() + len(state.kept["seen"]) + (state.scale or 0.0)
    state.kept["sums"][0] += 0.1
    state.kept["seen"].add(len(state.kept["seen"]))
    state.scale = 0.5
    error = state.by_index.setdefault(bucket.index(), torch.zeros_like(buffer))
    buffer += error
    error += 0.1
    return hooks.all_reduce(None, bucket)


def in_a_dict(state, bucket):
    """Same as `remembering`, with a dictionary as its state."""
    buffer = bucket.buffer()
    buffer += state.get("count", 0) + state.setdefault("errors", torch.zeros(1))
    state["count"] = state.get("count", 0) + 1
    state["errors"] += 0.5
    return hooks.all_reduce(None, bucket)


def by_bucket(state, bucket):
    """Same as `in_a_dict`, by the bucket's index."""
    buffer = bucket.buffer()
    buffer += state.setdefault(bucket.index(), torch.zeros(len(buffer)))
    state[bucket.index()] += 0.5
    return hooks.all_reduce(None, bucket)


STATES = {
    "power_sgd": lambda: (
        power.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5),
        power.powerSGD_hook,
    ),
    "power_sgd_cold": lambda: (
        power.PowerSGDState(
            None, 1, start_powerSGD_iter=2, min_compression_rate=0.5, warm_start=False
        ),
        power.powerSGD_hook,
    ),
    "attributes": lambda: (Remembering(), remembering),
    "dictionary": lambda: ({}, in_a_dict),
    "by_bucket": lambda: ({}, by_bucket),
}


def with_ddp(net, name):
    state, hook = STATES[name]()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    wrapped.register_comm_hook(state, hook)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return wrapped, sgd, wrapped.comm_hook_state_dict, wrapped.load_comm_hook_state_dict


def with_local_sgd(net, name):
    state, hook = STATES[name]()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = LocalSGD(sgd, net, every=2, fragments=2, hook=hook, hook_state=state)
    return net, optimizer, optimizer.state_dict, optimizer.load_state_dict


def step(net, optimizer, number):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    net(torch.randn(4, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    return [p.tolist() for p in net.parameters()]


@pytest.mark.parametrize("made", [with_ddp, with_local_sgd])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.narrow({"name": "power_sgd_cold"}, {"name": "attributes"}, {"name": "by_bucket"})
def test_a_resumed_run_continues_bit_for_bit(name, made):
    def main():
        def network():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        net, optimizer, save, _ = made(network(), name)
        file, history = io.BytesIO(), []
        for number in range(9):
            history.append(step(net, optimizer, number))
            if number == 4:
                torch.save((net.state_dict(), save()), file)
                held = save()
        file.seek(0)
        values, saved = torch.load(file, weights_only=True)  # plain data only
        again, resumed, _, load = made(network(), name)
        again.load_state_dict(values)
        load(saved)
        for number in range(5, 9):
            assert step(again, resumed, number) == history[number], number
        assert repr(held) == repr(saved), "what was saved has changed with the run"

    run_ranks(main, 2)


@pytest.mark.narrow({"each_backend": "shm"})
def test_entries_that_cannot_be_saved_are_a_warning():
    class Locked:
        def __init__(self):
            self.count, self.lock, self.kept = 1, threading.Lock(), {"deep": [object()]}
            self.process_group, self.function = dist.group.WORLD, len

    def main():
        net = nn.Linear(2, 2)
        optimizer = LocalSGD(
            torch.optim.SGD(net.parameters(), lr=0.1),
            net,
            every=1,
            hook=lambda state, bucket: hooks.all_reduce(None, bucket),
            hook_state=Locked(),
        )
        with pytest.warns(NotSavedWarning) as caught:
            saved = copy.deepcopy(optimizer.state_dict())
        assert saved["hook"]["plain"] == {"count": 1}
        texts = [str(each.message).partition(":")[0] for each in caught]
        assert texts == [
            "Locked.lock is not saved because it contains lock",
            "Locked.kept is not saved because it contains object",
        ]

    run_ranks(main, 1)
