"""Replicas of a module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradwire.devices import DataParallel, replicate
from gradwire.errors import NotSupportedError

CPUS = ["cpu"] * 4


def test_replicas_have_what_no_version_counter_shows() -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    parallel = DataParallel(model, ["cpu"] * 2)
    torch.testing.assert_close(parallel(x), model(x))
    model.weight.detach().numpy()[:] += 1.0
    torch.testing.assert_close(parallel(x), model(x))
    model.weight = nn.Parameter(torch.randn(3, 3))
    torch.testing.assert_close(parallel(x), model(x))


def test_replicas_are_modules_of_the_same_types() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(3))
    net = nn.Sequential(nn.Linear(3, 3), inner, nn.ParameterList([torch.ones(2)]))
    net[0].register_parameter("missing", None)
    net[1].register_module("nothing", None)
    for replica in replicate(net, CPUS):
        assert [type(m) for m in replica.modules()] == [type(m) for m in net.modules()]
        assert list(replica.parameters()) == []
        assert torch.equal(replica[0].weight, net[0].weight)
        assert torch.equal(replica[2][0], torch.ones(2))
        assert replica[0].missing is None
        assert replica[1].nothing is None
        assert replica[0].weight.requires_grad
    first, second, *_ = replicate(net, CPUS, detach=True)
    assert first[1][0].running_mean is net[1][0].running_mean
    assert second[1][0].running_mean is not net[1][0].running_mean
    assert not first[0].weight.requires_grad
    assert first[0].weight.data_ptr() == net[0].weight.data_ptr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_are_refused() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(NotSupportedError, match="TorchScript module at '0'"):
        replicate(nn.Sequential(script), CPUS)


def test_compiled_modules() -> None:
    net, x = nn.Linear(3, 3), torch.randn(4, 3)
    expected = net(x)
    with pytest.raises(NotSupportedError, match=r"compiled with torch\.compile at '0'"):
        replicate(nn.Sequential(torch.compile(net, backend="eager")), CPUS)
    assert torch.equal(net(x), expected)  # as it was
    net.compile(backend="eager")
    first, second = replicate(net, ["cpu"] * 2, detach=True)
    second.weight.zero_()
    assert torch.equal(second(x), net.bias.expand(4, 3))
    assert torch.equal(first(x), expected)


def test_replicas_in_compiled_code() -> None:
    model, x = nn.Linear(4, 1, bias=False), torch.ones(2, 4)
    compiled = torch.compile(lambda: replicate(model, ["cpu"] * 2, True)[1](x), backend="eager")
    for value in (1, 1, 2, 3):
        model.weight.data = torch.full((1, 4), float(value))
        assert torch.equal(compiled(), model(x))


def test_replicas_of_parameter_lists_and_dicts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.named = nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(2)})

        def forward(self, x: Tensor) -> Tensor:
            assert list(self.named) == ["a", "b"]
            return x * sum(self.many) + self.named["a"] + self.named["b"]

    net = Net()
    DataParallel(net, ["cpu"] * 2)(torch.ones(4, 2)).sum().backward()
    assert all(torch.equal(p.grad, torch.full((2,), 4.0)) for p in net.parameters())
