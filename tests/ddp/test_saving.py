"""Pickles, copies, state_dicts, and the state of hooks."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp.common import on_ranks
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentError, NotSavedWarning

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


def step(net, optimizer=None, number=0):
    net.zero_grad()
    net(torch.full((2, 4), 1.0 + dist.get_rank() + number / 10)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return [p.grad.clone() for p in net.parameters()]


@on_ranks(2)
def test_pickles_and_copies():
    pair = dist.new_group([0, 1])
    for group in (None, pair):
        net = DistributedDataParallel(
            mlp(), process_group=group, static_graph=True, bucket_cap_mb=1e-4
        )
        net.register_comm_hook(pair, hooks.bf16)
        want = step(net)
        for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert again.process_group is net.process_group
            assert again.reducer.logging_data().hook == "bf16"
            for _ in range(2):
                got = step(again)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
        torch.save(net, io.BytesIO())


@on_ranks(1)
def test_a_state_dict_is_the_modules_whatever_the_hook():
    """It loads elsewhere, and into a wrapper whose hook has another state, or none."""
    ours, plain = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    ours.register_comm_hook(power_sgd(), powerSGD_hook)
    step(ours)
    saved = ours.state_dict()
    assert list(saved) == [f"module.{n}" for n in mlp().state_dict()]
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    for other in (plain, nn.parallel.DistributedDataParallel(mlp())):
        other.load_state_dict(saved)
    with pytest.warns(NotSavedWarning, match="PowerSGDState, is not saved: define state_dict"):
        assert ours.comm_hook_state_dict() == {}
    assert plain.comm_hook_state_dict() == {}


def power_sgd():
    return PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
    )


@pytest.mark.parametrize("change", ["copy", "pickle"])
@on_ranks(2)
def test_a_copy_has_the_buckets_of_the_original(change):
    """PowerSGD keeps errors by the bucket's number."""
    net = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
    net.register_comm_hook(power_sgd(), powerSGD_hook)
    for number in range(5):
        step(net, None, number)
    other = copy.deepcopy(net) if change == "copy" else pickle.loads(pickle.dumps(net))
    assert other.reducer.buckets == net.reducer.buckets
    for number in range(3):
        for a, b in zip(step(net, None, number), step(other, None, number), strict=True):
            assert torch.equal(a, b)


@on_ranks(1)
def test_a_saved_state_needs_its_hook():
    net, plain = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    net.register_comm_hook(None, hooks.BlockQuantization())
    step(net)
    with pytest.raises(ArgumentError, match="register the same hook first"):
        plain.load_comm_hook_state_dict(net.comm_hook_state_dict())
    plain.load_comm_hook_state_dict(plain.comm_hook_state_dict())  # nothing
