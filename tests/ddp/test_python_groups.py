"""Process groups that are written in Python and registered with torch, as torchft's are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
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


def steps(net, model):
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
    return net.weight.grad.tolist()


def trained():
    inner = dist.new_group(backend="gloo")
    if "wrapped" not in dist.Backend.backend_list:
        dist.Backend.register_backend("wrapped", lambda *_: Wrapped(inner), devices=["cpu"])
    group = dist.new_group(backend="wrapped")
    net = nn.Linear(2, 1, bias=False)
    found = steps(net, DistributedDataParallel(net, process_group=group))
    return found, all_reduce(torch.ones(1), group=group).item()


def test_ddp_on_a_group_written_in_python():
    assert run_ranks(trained, 2, backend="gloo", timeout=60) == [([[1.5, 1.5]], 2.0)] * 2


class HandleOfFuture(dist.Work):
    """Handle of a future, with a `wait` that ignores its argument, which it requires."""

    def __init__(self, future):
        super().__init__()
        self._future = future

    def wait(self, timeout):
        self._future.wait()
        return True

    def get_future(self):
        return self._future


class WithHandles(Wrapped):
    """A group with handles of its own kind."""

    def __init__(self, inner, handle):
        super().__init__(inner)
        self._handle = handle

    def allreduce(self, tensors, opts=None):
        return self._handle(super().allreduce(tensors, opts).get_future())

    def allgather(self, outputs, inputs, opts=None):
        return self._handle(super().allgather(outputs, inputs, opts).get_future())

    def broadcast(self, tensors, opts=None):
        return self._handle(super().broadcast(tensors, opts).get_future())


def trained_without_store(handle):
    from gradwire.compat.ddp import DistributedDataParallel

    inner = dist.new_group(backend="gloo")
    # PyTorch's handle of a future refuses a timeout
    handles = {"python": HandleOfFuture, "future": _create_work_from_future}
    group = WithHandles(inner, handles[handle]) if handle else Wrapped(inner)
    net = nn.Linear(2, 1, bias=False)
    with pytest.warns(UserWarning, match="no store"):
        model = DistributedDataParallel(net, process_group=group)
    return steps(net, model), model._get_ddp_logging_data()["backend_name"]


@pytest.mark.parametrize("handle", [None, "python", "future"])
def test_ddp_on_a_group_without_a_store(handle):
    found = run_ranks(trained_without_store, 2, backend="gloo", timeout=60, args=(handle,))
    assert found == [([[1.5, 1.5]], "wrapped")] * 2
