"""Process groups that are written in Python and registered with torch, as torchft's are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, BarrierOptions

from gradwire import DistributedDataParallel, all_reduce
from gradwire.testing import run_ranks


class Wrapped(ProcessGroup):
    """A group around another; torch knows no device that it carries."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self):
        return "wrapped"

    def size(self):
        return self.inner.size()

    def rank(self):
        return self.inner.rank()

    def allreduce(self, tensors, opts=None):
        return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def allgather(self, outputs, inputs, opts=None):
        return self.inner.allgather(outputs, inputs, opts or AllgatherOptions())

    def broadcast(self, tensors, opts=None):
        return self.inner.broadcast(tensors, opts or dist.BroadcastOptions())

    def barrier(self, opts=None):
        return self.inner.barrier(opts or BarrierOptions())


def trained():
    inner = dist.new_group(backend="gloo")
    if "wrapped" not in dist.Backend.backend_list:
        dist.Backend.register_backend("wrapped", lambda *_: Wrapped(inner), devices=["cpu"])
    group = dist.new_group(backend="wrapped")
    net = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(net, process_group=group)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
    return net.weight.grad.tolist(), all_reduce(torch.ones(1), group=group).item()


def test_ddp_on_a_group_written_in_python():
    assert run_ranks(trained, 2, backend="gloo", timeout=60) == [([[1.5, 1.5]], 2.0)] * 2


def trained_without_store():
    group = Wrapped(dist.new_group(backend="gloo"))
    net = nn.Linear(2, 1, bias=False)
    with pytest.warns(UserWarning, match="no store"):
        model = DistributedDataParallel(net, process_group=group)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
    return net.weight.grad.tolist()


def test_ddp_on_a_group_without_a_store():
    assert run_ranks(trained_without_store, 2, backend="gloo", timeout=60) == [[[1.5, 1.5]]] * 2
