"""gradwire.devices under PyTorch's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gradwire import compat

CPUS = ["cpu", "cpu"]


@pytest.fixture
def installed() -> Iterator[None]:
    with compat.installed():
        yield


@pytest.mark.usefixtures("installed")
def test_comm_on_logical_replicas() -> None:
    comm = torch.nn.parallel.comm
    x = torch.randn(4, 3)
    assert torch.equal(comm.broadcast(x, CPUS)[1], x)
    assert torch.equal(comm.broadcast_coalesced([x], CPUS)[1][0], x)
    assert torch.equal(comm.reduce_add([x, x]), x + x)
    assert torch.equal(comm.reduce_add_coalesced([[x], [x]])[0], x + x)
    assert torch.equal(comm.scatter(x, CPUS, [1, 3])[1], x[1:])
    assert torch.equal(comm.gather([x, x], 1), torch.cat([x, x], 1))


@pytest.mark.usefixtures("installed")
def test_comm_refuses_as_pytorch_does() -> None:
    comm, x = torch.nn.parallel.comm, torch.randn(4, 3)
    for call in (
        lambda: comm.broadcast(x),
        lambda: comm.scatter(x, CPUS, [1, 1]),
        lambda: comm.gather([x], destination="cpu", out=x),
    ):
        for kind in (RuntimeError, ValueError):
            with pytest.raises(kind):
                call()


X = torch.ones(4, 3)


@pytest.mark.usefixtures("installed")
def test_warnings_begin_as_pytorchs() -> None:
    from torch.nn.parallel._functions import Gather

    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    means = torch.nn.DataParallel(Mean(), device_ids=CPUS)
    for call in (
        lambda: Gather.apply("cpu", 0, *scalars),
        lambda: torch.nn.parallel.gather(scalars, "cpu"),
        lambda: torch.nn.parallel.comm.gather(scalars),
        lambda: means(X),
        lambda: torch.nn.parallel.data_parallel(Mean(), X, CPUS),
    ):
        with pytest.warns(UserWarning, match="^Was asked to gather along dimension 0, but all"):
            assert call().shape == (2,)
    with pytest.warns(FutureWarning, match="^Using -1 to represent CPU tensor is deprecated"):
        torch.nn.parallel.comm.gather([X], destination=-1)
    assert torch.nn.parallel.comm.reduce_add_coalesced([]) == ()


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
def test_autograd_functions_on_logical_replicas() -> None:
    from torch.nn.parallel._functions import Broadcast, Gather, ReduceAddCoalesced, Scatter

    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ops: list[Any] = [
        lambda *t: Broadcast.apply(CPUS, *t),
        lambda *t: ReduceAddCoalesced.apply("cpu", 1, *t),
        lambda *t: Gather.apply("cpu", -1, *t),
        lambda *t: Scatter.apply(CPUS, None, 1, t[0]),
    ]
    for op in ops:
        given = inputs[:1] if op is ops[3] else inputs
        assert gradcheck(op, given)
        assert gradgradcheck(op, given)
    followed = [torch.ones(1, requires_grad=r) for r in (True, False, True)]
    assert [t.requires_grad for t in Broadcast.apply(CPUS, *followed)] == [True, False, True] * 2
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    assert Gather.apply(-1, 0, *scalars).tolist() == [1.0, 2.0]


@pytest.mark.usefixtures("installed")
def test_the_parts_of_data_parallel() -> None:
    from torch.nn.parallel import scatter_gather

    parallel = torch.nn.parallel
    x = torch.randn(4, 3)
    assert isinstance(parallel.scatter(x, CPUS), tuple)
    assert isinstance(parallel.scatter([x], CPUS), list)
    assert scatter_gather.scatter_kwargs((), None, CPUS) == ((), ())
    inputs, kwargs = scatter_gather.scatter_kwargs((x,), {"a": 1}, CPUS)
    assert (len(inputs), kwargs) == (2, ({"a": 1}, {"a": 1}))
    net = torch.nn.Linear(3, 2)
    assert parallel.replicate(net, []) == []
    outputs = parallel.parallel_apply(parallel.replicate(net, CPUS), inputs)
    torch.testing.assert_close(parallel.gather(outputs, "cpu"), net(x))
    torch.testing.assert_close(parallel.data_parallel(net, x, CPUS), net(x))
    with pytest.raises(ValueError, match="same keys and lengths"):
        parallel.gather([{"a": x}, {"a": x, "b": x}], "cpu")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("device_ids", [None, [0], range(2), ["cuda:0", torch.device("cuda", 1)]])
def test_data_parallel_without_accelerators_calls_the_module(
    device_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs for GPUs are tried without one: PyTorch takes any arguments, and cuts nothing."""
    monkeypatch.setattr("gradwire.compat.devices.default_devices", lambda: (torch.device("cpu"),))
    net = torch.nn.Bilinear(3, 2, 1)
    module = torch.nn.DataParallel(net, device_ids=device_ids)
    x, scalars = (torch.randn(4, 3), torch.randn(4, 2)), torch.nn.DataParallel(torch.nn.ReLU())
    torch.testing.assert_close(module(*x), net(*x))
    assert module.device_ids == []
    assert scalars(torch.tensor(2.0)).shape == ()


@pytest.mark.usefixtures("installed")
def test_data_parallel_on_one_device_takes_the_module_there() -> None:
    module = torch.nn.DataParallel(torch.nn.Linear(2, 1), device_ids=["meta"])
    assert module.module.weight.device.type == "meta"
    with pytest.raises(ValueError, match="devices\\[0\\] is 'cpux'"):
        torch.nn.DataParallel(torch.nn.Linear(2, 1), device_ids=["cpux"])
