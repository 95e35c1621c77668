"""DataParallel against the plain module."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap

from gradwire.devices import DataParallel, data_parallel
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


def test_every_kind_of_place(places: list[str]) -> None:
    plain = Cnn().eval().to(places[0], torch.float64)
    parallel = DataParallel(copy.deepcopy(plain), places)
    x = torch.randn(9, 3, 6, 6, dtype=torch.float64, device=places[0])
    for given in (x, x.cpu()):
        results = []
        for module, y in ((plain, x), (parallel, given)):
            module.zero_grad()
            out = module(y)
            assert out.device == torch.device(places[0])
            out.square().sum().backward()
            results.append([out, *(p.grad for p in module.parameters())])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


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


class Average(nn.Module):
    """A mean of all inputs so far, in a buffer that is read where gradients flow.

    Args:
        assigns: Whether the buffers become other tensors, or are written.
    """

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("average", torch.ones((), dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            average, count = (self.average + x.mean()) / 2, self.count + 1
        if self.assigns:
            self.average, self.count = average, count
        else:
            self.average.copy_(average)
            self.count.copy_(count)
        return x * self.weight * self.average


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize(("policy", "expected"), [("first", 2.0), ("mean", 3.0)])
def test_buffers_that_are_read_assigned_or_written(
    policy: Any, expected: float, assigns: bool
) -> None:
    module = Average(assigns=assigns)
    x = torch.tensor([[3.0], [7.0]], dtype=torch.float64)
    DataParallel(module, ["cpu"] * 2, buffers=policy)(x).sum().backward()
    assert module.weight.grad.item() == 3 * 2 + 7 * 4  # by what each replica had in its forward
    assert module.average.item() == expected
    assert module.count.item() == 1
    assert [*module.state_dict()] == ["weight", "average", "count"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mean_of_large_buffers(dtype: torch.dtype) -> None:
    """Neither a change nor the sum of the changes overflows in half precision."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.full((2,), -4e4, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.copy_(x[0])
            return x

    parallel = DataParallel(Large(), ["cpu"] * 2, buffers="mean")
    parallel(torch.full((2, 2), 4e4, dtype=dtype))
    torch.testing.assert_close(parallel.module.seen, torch.full((2,), 4e4, dtype=dtype))


def test_buffers_of_other_shapes_or_none() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("seen", torch.zeros(1))
            self.inner.register_buffer("last", None)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.seen, self.inner.last = torch.cat([self.inner.seen, x]), x
            return x

    x = torch.tensor([1.0, 2.0])
    parallel = DataParallel(Grows(), ["cpu"] * 2)
    parallel(x)
    assert parallel.module.inner.seen.tolist() == [0.0, 1.0]
    assert parallel.module.inner.last.tolist() == [1.0]
    with pytest.raises(
        ArgumentError, match=r"replica 0 made the buffer inner.seen, of shape \(1,\)"
    ):
        DataParallel(Grows(), ["cpu"] * 2, buffers="mean")(x)


@pytest.mark.parametrize("policy", ["first", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_buffer_with_two_names_is_one_in_replicas(policy: Any, dtype: torch.dtype) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = torch.zeros((), dtype=dtype)
            self.writer, self.reader = nn.Module(), nn.Module()
            self.writer.register_buffer("count", count)
            self.reader.register_buffer("number", count)

        def forward(self, x: Tensor) -> Tensor:
            self.writer.count += 1
            return x + self.reader.number

    parallel = DataParallel(Counts(), ["cpu"] * 2, buffers=policy)
    assert [parallel(torch.zeros(2)).tolist() for _ in range(2)] == [[1.0, 1.0], [2.0, 2.0]]
    assert parallel.module.reader.number is parallel.module.writer.count
    assert parallel.module.reader.number.item() == 2


def test_modules_without_inputs_run_once() -> None:
    class Net(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3)

    assert torch.equal(DataParallel(Net(), CPUS)(), torch.ones(3))
    assert torch.equal(data_parallel(Net(), None, CPUS), torch.ones(3))


def test_sparse_gradients() -> None:
    layer = nn.Embedding(10, 5, sparse=True)
    twin = copy.deepcopy(layer)
    index = torch.randint(10, (20, 5))
    for module in (twin, DataParallel(layer, CPUS)):
        module(index).square().sum().backward()
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), twin.weight.grad.to_dense())


def test_inputs_and_named_ones_stay_together() -> None:
    """Also when there are fewer rows than replicas, or only one of them has tensors."""

    class Net(nn.Module):
        def forward(self, x: Tensor, *, y: Any) -> Tensor:
            return x + y

    for rows in (1, 2, 3, 5):
        x = torch.randn(rows, 2)
        for a, b in ((x, x), (x, 1), (2, x)):
            assert torch.equal(DataParallel(Net(), CPUS)(a, y=b), torch.as_tensor(a + b))


def test_unused_parameters_have_zero_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1, dtype=torch.complex64)
            self.turned = nn.Parameter(torch.tensor(1.0 + 2.0j))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + (x * self.turned).real.sum()

    net = Net()
    DataParallel(net, CPUS[:2])(torch.ones(4, 2)).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    assert gradients.pop("frozen") is None
    for name, gradient in gradients.items():
        assert gradient is not None
        assert gradient.dtype == net.get_parameter(name).dtype
        assert gradient.any() == (not name.startswith("unused"))
    assert net.turned.grad == 16  # each replica's four numbers count for both of its rows


def by_weight(model: Any, x: Tensor) -> Any:
    return grad(lambda w: functional_call(model, w, (x,)).sum())(dict(model.named_parameters()))


def by_input(model: Any, x: Tensor) -> Any:
    return grad(lambda x: model(x).sum())(x)


def by_tangent(model: Any, x: Tensor) -> Any:
    return jvp(model, (x,), (torch.ones_like(x),))


def by_batch(model: Any, x: Tensor) -> Any:
    return vmap(model)(torch.stack([x, 2 * x]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # jvp's own
@pytest.mark.parametrize("transformed", [by_weight, by_input, by_tangent, by_batch])
def test_torch_func_transforms_need_a_single_device(transformed: Callable[..., Any]) -> None:
    """Around several devices they had the first replica's share only, or failed in autograd."""
    linear, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    message = r"DataParallel on 2 devices inside torch\.func transforms.*with backward\(\)"
    with pytest.raises(NotSupportedError, match=message):
        transformed(DataParallel(linear, ["cpu"] * 2), x)
    found = transformed(DataParallel(linear, ["cpu"]), x)
    expected = transformed(linear, x)
    if transformed is by_weight:
        found = {name.removeprefix("module."): value for name, value in found.items()}
    torch.testing.assert_close(found, expected)


def test_no_reference_cycles() -> None:
    def trained() -> DataParallel[Any]:
        model = DataParallel(Cnn(), CPUS, buffers="mean")
        model(torch.randn(8, 3, 6, 6)).sum().backward()
        return model

    trained()  # imports modules of PyTorch, which leave cycles
    gc.collect()
    gc.disable()
    try:
        model = trained()
        assert gc.collect() == 0
        del model
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_copies_and_pickles() -> None:
    parallel = DataParallel(nn.Linear(3, 2), CPUS)
    x = torch.randn(4, 3)
    expected = parallel(x)
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert torch.equal(twin(x), expected)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_formats_and_dtypes_over_two_steps(dtype: torch.dtype) -> None:
    """Gradients have their parameters' formats, also where the second step finds them zeroed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(8, 16, 2).to(memory_format=torch.channels_last)
            self.second = nn.Conv2d(16, 8, 2).to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).to(dtype)).float()

    plain, x = Net(), torch.randn(8, 8, 5, 5)
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * 2)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for _ in range(2):
        for module in (plain, parallel):
            module.zero_grad(set_to_none=False)
            module(x).square().mean().backward()
        for theirs, ours in zip(plain.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, atol=tolerance, rtol=tolerance)
        inner = parallel.module
        assert inner.first.weight.grad.is_contiguous(memory_format=torch.channels_last)
        assert inner.second.weight.grad.is_contiguous()


def test_gradients_of_inputs_and_buffers_are_right_twice() -> None:
    class Net(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * self.scale

    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, scale: Tensor) -> Tensor:
        return data_parallel(Net(scale), x, ["cpu"] * 2)

    assert gradcheck(run, (x, scale))
    assert gradgradcheck(run, (x, scale))


def test_the_output_device() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    for destination in ("cpu", torch.device("cpu"), -1):
        torch.testing.assert_close(data_parallel(linear, x, CPUS, destination), linear(x))
        torch.testing.assert_close(DataParallel(linear, CPUS, destination)(x), linear(x))
    assert DataParallel(linear, ["cpu"], "meta")(x).device.type == "meta"


def test_torch_built_for_absent_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    module = DataParallel(nn.Linear(1, 1))
    assert module.devices == (torch.device("cpu"),)
    assert module(torch.ones(2, 1)).shape == (2, 1)


def test_two_threads_share_one_data_parallel() -> None:
    parallel = DataParallel(nn.Linear(3, 3), CPUS)
    given = [torch.randn(8, 3) for _ in range(8)]
    found: dict[int, Tensor] = {}

    def run(first: int) -> None:
        for i in range(first, len(given), 2):
            found[i] = parallel(given[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(given):
        torch.testing.assert_close(found[i], parallel.module(x))
