"""Replicas of a module, and the cache of their parameters."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import _global_optimizer_post_hooks

from gradwire.devices import DataParallel, ReplicaCache, replicate
from gradwire.devices.replicate import _after_step, _caches
from gradwire.errors import NotSupportedError

CPUS = ["cpu"] * 4


def copied(cache_replicas: bool = True) -> tuple[Any, Callable[[], list[int]]]:
    """A DataParallel, and what storages its second replica's weights have after a forward."""
    seen: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no other copy can get the memory of an earlier one

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 1:
                kept.extend([self.a.weight, self.b.weight])
                seen.update({i: m.weight.data_ptr() for i, m in enumerate((self.a, self.b))})
            return self.b(self.a(x))

    parallel = DataParallel(Net(), ["cpu"] * 2, cache_replicas=cache_replicas)
    x = torch.zeros(2, 3)
    x[1] = 1

    def run() -> list[int]:
        out = parallel(x)
        torch.testing.assert_close(out, parallel.module(x))
        if out.requires_grad:
            out.sum().backward()
        return [seen[0], seen[1]]

    return parallel, run


def test_a_second_forward_copies_nothing_and_a_step_makes_it_copy() -> None:
    parallel, run = copied()
    first = run()
    assert run() == first
    with torch.no_grad():
        assert run() == first
    with torch.inference_mode():
        assert run() == first
    torch.optim.SGD(parallel.parameters(), 0.1).step()
    second = run()
    assert set(second).isdisjoint(first)
    assert run() == second


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "lr": 0.1}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_every_optimizers_step_is_seen(optimizer: Any, options: dict[str, Any]) -> None:
    """Fused ones write their parameters without a trace in the version counters."""
    parallel, run = copied()
    step = optimizer(parallel.parameters(), **options).step
    for _ in range(3):
        run()
        step()
    run()


def test_a_step_of_another_models_optimizer_changes_nothing() -> None:
    _, run = copied()
    first = run()
    other = nn.Linear(1, 1)
    other(torch.ones(1)).backward()
    torch.optim.SGD(other.parameters(), 0.1, fused=True).step()
    assert run() == first


def test_caches_are_not_kept_alive_and_share_one_hook() -> None:
    first, second = ReplicaCache(), ReplicaCache()
    hooks = list(_global_optimizer_post_hooks.values())
    assert hooks.count(_after_step) == 1
    gone = weakref.ref(first)
    del first
    assert gone() is None
    assert second in _caches


def test_only_what_was_written_is_copied() -> None:
    parallel, run = copied()
    first = run()
    with torch.no_grad():
        parallel.module.b.weight.add_(1)
    second = run()
    assert second[0] == first[0]
    assert second[1] != first[1]


def test_a_new_parameter_or_new_data_is_copied() -> None:
    parallel, run = copied()
    run()
    parallel.module.a.weight = nn.Parameter(torch.randn(3, 3))
    run()
    parallel.module.b.weight.data = torch.randn(3, 3)
    run()


def set_shape(x: Tensor) -> None:
    x.data = x.data[:1]


def set_strides(x: Tensor) -> None:
    x.data = x.data.t()


def set_dtype(x: Tensor) -> None:
    x.data = x.data.view(torch.int64)


def set_conjugate(x: Tensor) -> None:
    x.data = x.data.conj()


def set_storage(x: Tensor) -> None:
    x.set_(torch.ones(2, 2, dtype=x.dtype))


def swap(x: Tensor) -> None:
    torch.utils.swap_tensors(x, torch.ones(2, 2, dtype=x.dtype))


def resize(x: Tensor) -> None:
    """As sharded parameters lose their memory, and get it back."""
    storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    x.fill_(3)


@pytest.mark.parametrize(
    "change", [set_shape, set_strides, set_dtype, set_conjugate, set_storage, swap, resize]
)
def test_what_a_parameter_consists_of_is_compared(change: Callable[[Tensor], None]) -> None:
    x = torch.arange(4.0).reshape(2, 2) * (1 + (1j if change is set_conjugate else 0))
    cache, devices = ReplicaCache(), (torch.device("cpu"),) * 2
    cache.copies([x], devices)
    change(x)
    (_,), (replica,) = cache.copies([x], devices)
    assert replica.dtype == x.dtype
    assert torch.equal(replica, x)
    assert cache.copies([x], devices)[1][0].data_ptr() == replica.data_ptr()


def test_new_data_at_an_address_that_was_freed_is_seen() -> None:
    memory, cache, devices = bytearray(64), ReplicaCache(), (torch.device("cpu"),) * 2
    x = torch.frombuffer(memory, dtype=torch.float32)
    address, version = x.data_ptr(), x._version
    cache.copies([x], devices)
    x.data = torch.empty(0)
    torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    x.data = torch.frombuffer(memory, dtype=torch.float32)
    assert (x.data_ptr(), x._version) == (address, version)
    assert torch.equal(cache.copies([x], devices)[1][0], torch.ones(16))


def test_parameters_that_share_a_storage_are_told_apart() -> None:
    flat, cache, devices = torch.arange(6.0), ReplicaCache(), (torch.device("cpu"),) * 2
    tensors = [nn.Parameter(t) for t in flat.split([3, 3, 0])]
    cache.copies(tensors, devices)
    tensors[1].data = flat[:3]
    replicas = cache.copies(tensors, devices)[1]
    assert [r.tolist() for r in replicas] == [[0, 1, 2], [0, 1, 2], []]


def test_memory_that_a_parameter_leaves_is_freed_at_once() -> None:
    x, cache = torch.ones(4), ReplicaCache()
    cache.copies([x], (torch.device("cpu"),) * 2)
    storage = StorageWeakRef(x.untyped_storage())
    x.data = torch.zeros(4)
    assert storage.expired()


def test_vectors_and_dtypes_that_come_and_go() -> None:
    """Each changes parameters by `.data = new`; the new memory is often what was freed."""
    linear = nn.Linear(64, 64, bias=False)
    parallel, x = DataParallel(linear, ["cpu"] * 2), torch.randn(4, 64)
    start = parameters_to_vector(linear.parameters()).detach().clone()
    with torch.no_grad():
        for _ in range(20):
            vector_to_parameters(start + torch.randn(64 * 64), linear.parameters())
            torch.testing.assert_close(parallel(x), linear(x), rtol=1e-4, atol=1e-4)
            vector_to_parameters(start, linear.parameters())
            linear.half()
            linear.float()
            torch.testing.assert_close(parallel(x), linear(x), rtol=1e-4, atol=1e-4)


def test_writes_through_data_need_clear_cache() -> None:
    parallel, run = copied()
    run()
    parallel.module.a.weight.data.add_(1)
    with pytest.raises(AssertionError):
        run()
    parallel.clear_cache()
    run()


def test_without_a_cache_every_forward_copies() -> None:
    parallel, run = copied(cache_replicas=False)
    run()
    parallel.module.a.weight.data.add_(1)
    run()


def test_a_replica_that_writes_its_parameters_gets_new_ones() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            with torch.no_grad():
                if x[0, 0] == 1:
                    self.weight.zero_()
            return out

    x = torch.zeros(2, 3)
    x[1] = 1
    parallel = DataParallel(Net(3, 3), ["cpu"] * 2)
    with torch.no_grad():
        first = parallel(x)
        assert torch.equal(parallel(x), first)


def test_a_smaller_last_batch_uses_the_same_copies() -> None:
    parallel = DataParallel(nn.Linear(3, 3), CPUS)
    for rows in (8, 2, 8, 3, 8):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(parallel(x), parallel.module(x))
        torch.optim.SGD(parallel.parameters(), 0.1).step()


def test_several_forwards_of_one_set_of_copies() -> None:
    """Their graphs are apart: each can be run backward by itself, or both at once."""
    linear = nn.Linear(3, 1, bias=False)
    parallel = DataParallel(linear, ["cpu"] * 2)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    first, second = parallel(x), parallel(y)
    first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close(linear.weight.grad, (x + y).sum(0, keepdim=True))
    linear.weight.grad = None
    (parallel(x) + parallel(y)).sum().backward()
    torch.testing.assert_close(linear.weight.grad, (x + y).sum(0, keepdim=True))


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(detach: bool) -> None:
    replicas = replicate(nn.Linear(8, 8), ["cpu"] * 2, detach)
    file = io.BytesIO()
    torch.save(replicas, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded[1].weight, replicas[1].weight)


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


def test_replicas_of_modules_without_tensors() -> None:
    assert len(replicate(nn.ReLU(), CPUS)) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_are_refused() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(NotSupportedError, match="TorchScript module at '0'"):
        replicate(nn.Sequential(script), CPUS)


def test_compiled_modules() -> None:
    net, x = nn.Linear(3, 3), torch.randn(4, 3)
    expected = net(x)
    with pytest.raises(NotSupportedError, match=r"torch\.compile made at '0'"):
        replicate(nn.Sequential(torch.compile(net, backend="eager")), CPUS)
    assert torch.equal(net(x), expected)  # as it was
    net.compile(backend="eager")
    first, second = replicate(net, ["cpu"] * 2, detach=True)
    second.weight.zero_()
    assert torch.equal(second(x), net.bias.expand(4, 3))
    assert torch.equal(first(x), expected)


def test_a_cache_in_compiled_code() -> None:
    x, cache, devices = torch.ones(4), ReplicaCache(), (torch.device("cpu"),) * 2
    compiled = torch.compile(lambda: cache.copies([x], devices)[1][0] * 1, backend="eager")
    for value in (1, 1, 2, 3):
        x.data = torch.full((4,), float(value))
        assert torch.equal(compiled(), x)
    gc.collect()  # pytest reports what goes wrong while objects are deleted


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


def test_replicas_give_what_the_module_gives() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    for devices in (CPUS, tuple(CPUS)):
        for replica in replicate(net, devices):
            assert torch.equal(replica(x), net(x))
            assert replica[1].num_batches_tracked.device == torch.device("cpu")
