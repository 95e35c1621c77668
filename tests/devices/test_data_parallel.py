"""Replicas, their cache, and DataParallel against the plain module."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.devices import DataParallel, data_parallel, replicate
from gradwire.errors import ArgumentError, NotSupportedError

CPUS = ["cpu"] * 4


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(x)[0]


class Nested(nn.Module):
    """Takes and gives containers; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, given: Any, *, extra: dict[str, Tensor]) -> Any:
        a, (b, scale) = given
        y = self.second(self.first(a) + b * scale)
        return [y, (y.sin(), OrderedDict(c=y.cos(), d=[extra["x"] * y]))]


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def flat(value: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(value)


def same_as_plain(plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs and gradients of the plain module and of DataParallel, before and after a step."""
    plain.double()
    parallel = DataParallel(copy.deepcopy(plain), CPUS)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, parallel)]
    for _ in range(2):
        results = []
        for module, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            out = flat(module(*args, **kwargs))
            sum(
                (t * torch.linspace(0, 1, t.numel()).double().view_as(t)).sum() for t in out
            ).backward()
            results.append([*out, *(p.grad for p in module.parameters())])
            optimizer.step()
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Cnn().eval(), (10, 3, 6, 6)),
        (transformer, (10, 5, 8)),
        (Rnn, (10, 7, 6)),
        (lambda: nn.Linear(4, 2), (3, 4)),
    ],
    ids=["cnn", "transformer", "rnn", "fewer rows than replicas"],
)
def test_outputs_and_gradients_are_the_plain_modules(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    same_as_plain(make(), torch.randn(shape, dtype=torch.float64))


def test_nested_inputs_and_outputs() -> None:
    a, b, x = torch.randn(3, 9, 4, dtype=torch.float64)
    same_as_plain(Nested(), (a, (b, 3)), extra={"x": x})


@pytest.mark.parametrize("policy", ["first", "mean"])
def test_batch_norm_in_training(policy: Any) -> None:
    """Each chunk is normalised by itself; what becomes of the statistics is the policy's."""
    plain, x = Cnn(), torch.randn(8, 3, 6, 6)
    parallel = DataParallel(copy.deepcopy(plain), CPUS, buffers=policy)
    twins = [copy.deepcopy(plain) for _ in CPUS]
    expected = torch.cat([m(c) for m, c in zip(twins, x.chunk(4), strict=True)])
    out = parallel(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, p in parallel.module.named_parameters():
        grads = [dict(m.named_parameters())[name].grad for m in twins]
        torch.testing.assert_close(p.grad, sum(grads))
    buffers = dict(parallel.module.named_buffers())
    for name in ("bn.running_mean", "bn.running_var"):
        values = torch.stack([dict(m.named_buffers())[name] for m in twins])
        expected = values[0] if policy == "first" else values.mean(0)
        torch.testing.assert_close(buffers[name], expected)
    assert buffers["bn.num_batches_tracked"].item() == 1


def test_statistics_reach_the_replicas_although_no_version_counter_shows_them() -> None:
    parallel = DataParallel(nn.BatchNorm1d(2), ["cpu"] * 2)
    x = torch.randn(8, 2) + 5
    for _ in range(3):
        parallel(x)
    parallel.eval()
    torch.testing.assert_close(parallel(x), parallel.module(x))


def test_buffers_error_policy() -> None:
    x = torch.randn(8, 3, 6, 6)
    with pytest.raises(ArgumentError, match=r"replica 1 wrote the buffer bn.running_mean"):
        DataParallel(Cnn(), CPUS, buffers="error")(x)
    DataParallel(Cnn().eval(), CPUS, buffers="error")(x)
    with pytest.raises(ArgumentError, match="buffers is 'last'"):
        DataParallel(Cnn(), CPUS, buffers="last")  # type: ignore[arg-type]


def test_the_mean_leaves_constant_buffers_alone() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.1, float("-inf"), float("inf")]))

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    parallel = DataParallel(Masked(), ["cpu"] * 3, buffers="mean")
    before = parallel.module.mask.clone()
    parallel(torch.zeros(3))
    assert torch.equal(parallel.module.mask, before)


def test_buffers_that_require_grad() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(5, dtype=torch.float64, requires_grad=True))
            self.register_buffer("shift", torch.randn(5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    module = Scaled()
    x = torch.randn(4, 5, dtype=torch.float64)
    parallel = DataParallel(module, ["cpu"] * 2)
    parallel(x).sum().backward()
    torch.testing.assert_close(module.scale.grad, x.sum(0))


def test_multiple_inputs_and_named_ones() -> None:
    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor, s: float, c: Tensor | None = None) -> Tensor:
            return s * (a * b if c is None else a * b + c)

    a, b = torch.randn(5, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    c = torch.randn(5, 5)
    for devices in (["cpu"], ["cpu"] * 2, CPUS):
        for kwargs in ({}, {"c": c}):
            a.grad = b.grad = None
            out = data_parallel(Net(), (a, b, 1.5), devices, module_kwargs=kwargs)
            assert torch.equal(out, Net()(a, b, 1.5, **kwargs))
            out.sum().backward()
            torch.testing.assert_close(a.grad, 1.5 * b.detach())
            torch.testing.assert_close(b.grad, 1.5 * a.detach())
            torch.testing.assert_close(DataParallel(Net(), devices)(a, b, 1.5, **kwargs), out)


@pytest.mark.parametrize("unused", [[], {}, (), None])
def test_named_inputs_with_empty_containers(unused: Any) -> None:
    class Net(nn.Module):
        def forward(self, input: dict[str, Any]) -> Tensor:
            assert input["unused"] == unused
            return input["data"] * 2

    x = torch.randn(6, 2)
    assert torch.equal(DataParallel(Net(), CPUS)(input={"data": x, "unused": unused}), x * 2)


def test_modules_without_inputs_run_once() -> None:
    class Net(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3)

    assert torch.equal(DataParallel(Net(), CPUS)(), torch.ones(3))
    assert torch.equal(data_parallel(Net(), None, CPUS), torch.ones(3))


def test_no_grad_and_inference_mode() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(5, 3)
    parallel = DataParallel(linear, CPUS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not parallel(x).requires_grad
            assert torch.equal(parallel(x), parallel(x))
    assert parallel(x).requires_grad


def test_double_backward_through_replicas() -> None:
    net = nn.Linear(4, 1)
    x = torch.ones(2, 4, requires_grad=True)
    out = DataParallel(net, ["cpu"] * 2)(x)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    grad.mean().backward()
    assert torch.equal(net.weight.grad, torch.full((1, 4), 0.25))


def test_sparse_gradients() -> None:
    layer = nn.Embedding(10, 5, sparse=True)
    twin = copy.deepcopy(layer)
    index = torch.randint(10, (20, 5))
    for module in (twin, DataParallel(layer, CPUS)):
        module(index).square().sum().backward()
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), twin.weight.grad.to_dense())


def test_gradients_have_the_parameters_memory_format() -> None:
    conv = nn.Conv2d(8, 16, 2).to(memory_format=torch.channels_last)
    DataParallel(conv, CPUS)(torch.randn(8, 8, 5, 5)).sum().backward()
    assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_the_module_must_be_on_the_first_device() -> None:
    with pytest.raises(ArgumentError, match="weight is on meta: move the module there"):
        DataParallel(nn.Linear(2, 2, device="meta"), CPUS)(torch.ones(4, 2))
    with pytest.raises(ArgumentError, match="weight is not initialised"):
        DataParallel(nn.LazyLinear(2), CPUS)(torch.ones(4, 2))


def test_batches_of_different_sizes_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"inputs\[0\]\[1\] has size 4 in dim 0, .* has 8"):
        DataParallel(nn.Bilinear(3, 3, 1), CPUS)(torch.ones(8, 3), torch.ones(4, 3))
    named = {"input": torch.ones(4, 3)}
    with pytest.raises(ArgumentError, match=r"inputs\[1\]\['input'\] has size 4"):
        data_parallel(nn.Linear(3, 3), (torch.ones(8, 3),), CPUS, module_kwargs=named)


def test_inputs_and_named_ones_stay_together() -> None:
    """Also when there are fewer rows than replicas, or only one of them has tensors."""

    class Net(nn.Module):
        def forward(self, x: Tensor, *, y: Any) -> Tensor:
            return x + y

    for rows in (1, 2, 3, 5):
        x = torch.randn(rows, 2)
        assert torch.equal(DataParallel(Net(), CPUS)(x, y=x), x + x)
        assert torch.equal(DataParallel(Net(), CPUS)(x, y=1), x + 1)
        assert torch.equal(DataParallel(Net(), CPUS)(2, y=x), x + 2)


def test_dataclasses_ints_and_strings_are_outputs() -> None:
    @dataclass
    class Result:
        y: Tensor
        rows: int

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Result(x, len(x)), "word", None

    result, word, none = DataParallel(Net(), CPUS)(torch.arange(7))
    assert torch.equal(result.y, torch.arange(7))
    assert result.rows == [2, 2, 2, 1]
    assert (word, none) == (["word"] * 4, None)


def test_errors_name_the_replica() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.max() > 4:
                raise KeyError("large")
            return x

    with pytest.raises(KeyError, match=r"large \(in replica 2 on cpu\)"):
        DataParallel(Net(), CPUS)(torch.arange(8))


def test_no_reference_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        model = DataParallel(Cnn(), CPUS, buffers="mean")
        model({"x": torch.randn(8, 3, 6, 6)}["x"]).sum().backward()
        assert gc.collect() == 0
        del model
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_zero_grad_in_a_replica_warns() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return x

    with pytest.warns(UserWarning, match="zero_grad"):
        DataParallel(Net(), ["cpu"] * 2)(torch.ones(4))


def test_scalars_become_a_vector() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    with pytest.warns(UserWarning, match="gather was given scalars"):
        out = DataParallel(Loss(), ["cpu"] * 2)(torch.arange(4.0))
    assert out.tolist() == [1.0, 5.0]


def test_subclasses_replace_the_parts() -> None:
    class Doubling(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, devices: Any) -> Any:
            chunks, named = super().scatter(inputs, kwargs, devices)
            return [(x * 2,) for (x,) in chunks], named

    assert torch.equal(Doubling(nn.Identity(), CPUS)(torch.ones(4)), torch.full((4,), 2.0))


def test_copies_and_pickles() -> None:
    parallel = DataParallel(nn.Linear(3, 2), CPUS)
    x = torch.randn(4, 3)
    expected = parallel(x)
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert torch.equal(twin(x), expected)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


# Replicas and their cache.


def copied(cache_replicas: bool = True) -> tuple[Any, Callable[[], list[int]]]:
    """A DataParallel, and what storages its second replica's weights have after a forward."""
    seen: dict[int, int] = {}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 1:
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
