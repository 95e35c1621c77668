"""Compatibility with programs that expect PyTorch's class and its attributes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from ddp.common import on_ranks
from gradwire.compat.ddp import DistributedDataParallel as CompatDDP
from gradwire.ddp import DistributedDataParallel


class MLP(nn.Module):
    """Three layers of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Runs(nn.Linear):
    """A layer; as Lightning's modules, it may be given a training step to run as its forward."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) if isinstance(x, Tensor) else x(super().forward)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return Runs(3, 2)


def own_batch(step: int = 0) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank() + 1)
    return torch.randn(4, 3)


@on_ranks(2, backend="gloo")
def test_isinstance_of_torchs_class_without_inheritance() -> None:
    for cls in (DistributedDataParallel, CompatDDP):
        net = cls(linear())
        assert isinstance(net, TorchsDDP)
        assert issubclass(cls, TorchsDDP)
        assert TorchsDDP not in cls.__mro__
        for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert type(again) is cls
            assert isinstance(again, TorchsDDP)
    assert not isinstance(linear(), TorchsDDP)
    if dist.get_backend() == "gloo":
        assert not isinstance(TorchsDDP(linear()), DistributedDataParallel)


@on_ranks(2)
def test_checkpoints_have_the_modules_keys() -> None:
    net = DistributedDataParallel(linear())
    saved = get_model_state_dict(net)
    assert sorted(saved) == ["bias", "weight"]
    other = DistributedDataParallel(nn.Linear(3, 2))
    set_model_state_dict(other, saved)
    assert torch.equal(other.module.weight, net.module.weight)


# -- the reducer -----------------------------------------------------------------------------


def gradients(cls: type, train: Any, **options: Any) -> list[list[float]]:
    net = cls(linear(), **options)
    train(net)
    return [p.grad.flatten().tolist() for p in net.module.parameters()]


def sync_in_backward(net: Any) -> None:
    """As Accelerate's trigger_sync_in_backward: forwards without, then a backward with it."""
    for _ in range(2):
        net.zero_grad()
        with net.no_sync():
            losses = [net(own_batch(step)).square().mean() for step in range(3)]
            losses[0].backward()
        before, net.require_backward_grad_sync = net.require_backward_grad_sync, True
        net.reducer.prepare_for_backward([])
        losses[1].backward()
        net.require_backward_grad_sync = before


def pipeline(net: Any) -> None:
    """As torch.distributed.pipelining: the last of several micro-batches is reduced."""
    for _ in range(2):
        net.zero_grad()
        with net.no_sync():
            outputs = [net(own_batch(step)) for step in range(3)]
            for output in outputs[:-1]:
                output.sum().backward()
        net.reducer.prepare_for_backward(outputs[-1:])
        outputs[-1].square().sum().backward()


def manual_optimization(net: Any) -> None:
    """As Lightning: two forwards and backwards within a forward, each backward prepared for."""

    def training_step(call: Any) -> None:
        for part in range(2):
            loss = call(own_batch(part)).square().mean()
            net.require_forward_param_sync = True
            net.reducer._rebuild_buckets()
            net.reducer.prepare_for_backward([])
            loss.backward()
        net.require_backward_grad_sync = False

    for _ in range(3):
        net.zero_grad()
        net(training_step)
        net.require_backward_grad_sync = True


@pytest.mark.parametrize("train", [sync_in_backward, pipeline, manual_optimization])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@on_ranks(2, backend="gloo")
def test_prepare_for_backward(train: Any, find_unused_parameters: bool) -> None:
    expected = gradients(TorchsDDP, train)  # it takes no empty list where some may be unused
    options = {"find_unused_parameters": find_unused_parameters}
    for cls in (DistributedDataParallel, CompatDDP):
        torch.testing.assert_close(gradients(cls, train, **options), expected)


@on_ranks(2)
def test_has_rebuilt_buckets() -> None:
    net = DistributedDataParallel(linear())
    rebuilt = []
    for step in range(2):
        net(own_batch(step)).sum().backward()
        rebuilt.append(net._has_rebuilt_buckets)
    assert rebuilt == [False, True]
    assert net.reducer._rebuild_buckets() is False
    net.reducer._delay_all_reduce()


# -- torch.compile ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [DistributedDataParallel, CompatDDP])
@on_ranks(1, timeout=100)
def test_compiled_graphs_are_split_at_buckets(cls: type) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    net = cls(MLP(), bucket_cap_mb=1)
    call = torch.compile(net, backend=backend)
    call(torch.ones(2, 512)).sum().backward()
    assert len(graphs) > 1
    assert TorchsDDP._active_ddp_module is None
    with pytest.raises(RuntimeError, match="shape"):
        net(torch.ones(2, 3))
    assert TorchsDDP._active_ddp_module is None


@on_ranks(1, timeout=100)
def test_torch_containers_are_compiled() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    net = DistributedDataParallel(nn.Sequential(linear()))
    torch.compile(net, backend=backend)(own_batch()).sum().backward()
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@on_ranks(2, timeout=100)
def test_a_whole_step_is_compiled(options: dict[str, Any]) -> None:
    """What autograd calls is not: it would be traced where backward was called."""

    def train(compiled: bool) -> list[float]:
        net = DistributedDataParallel(linear(), **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with net.no_sync():
                net.weight(2)
                net(x).mean().backward()
            net.weight(1 + dist.get_rank())
            loss: torch.Tensor = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(step, backend="eager") if compiled else step
        return [run(own_batch()).item() for _ in range(3)]

    assert train(compiled=True) == pytest.approx(train(compiled=False), rel=1e-6)
