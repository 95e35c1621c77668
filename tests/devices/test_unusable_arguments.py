"""Arguments that cannot be used are named, whatever the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.devices import (
    DataParallel,
    broadcast,
    broadcast_coalesced,
    gather,
    reduce_add,
    reduce_add_coalesced,
    scatter,
    scatter_nested,
)
from gradwire.errors import ArgumentError, ArgumentTypeError

CPUS: Any = ["cpu"] * 2
X: Any = torch.ones(4, 2)
BAD: Any = None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scatter(BAD, CPUS), "tensor is a NoneType"),
        (lambda: scatter(X, CPUS, dim=1.0), "dim is 1.0, a float"),  # type: ignore[arg-type]
        (lambda: scatter(X, CPUS, [2.0, 2.0]), r"chunk_sizes is \[2.0, 2.0\]"),  # type: ignore[list-item]
        (lambda: scatter(X, CPUS, 2), "chunk_sizes is 2"),  # type: ignore[arg-type]
        (lambda: broadcast(X.numpy(), CPUS), "tensor is a ndarray"),
        (lambda: broadcast(X, out=X), "out is a tensor"),
        (lambda: broadcast(X, out=[X, BAD]), r"out\[1\] is a NoneType"),
        (lambda: broadcast_coalesced(X, CPUS), "tensors is a tensor"),
        (lambda: broadcast_coalesced([1], CPUS), r"tensors\[0\] is a int"),  # type: ignore[list-item]
        (lambda: reduce_add(X), "inputs is a tensor"),
        (lambda: broadcast_coalesced([X], CPUS, 1e6), "buffer_size is 1000000.0"),  # type: ignore[arg-type]
        (lambda: reduce_add(BAD), "inputs is a NoneType"),
        (lambda: reduce_add_coalesced([X, X]), r"inputs\[0\] is a tensor"),
        (lambda: gather({"a": X}), r"tensors\[0\] is a str"),  # type: ignore[dict-item]
        (lambda: gather([X], out=3), "out is a int"),  # type: ignore[arg-type]
        (lambda: DataParallel(torch.sin), "module is a builtin_function_or_method"),  # type: ignore[type-var]
        (lambda: DataParallel(nn.ReLU(), dim="0"), "dim is '0', a str"),  # type: ignore[arg-type]
        *((lambda d=d: broadcast(X, [d]), r"devices\[0\] is") for d in (True, 1.5, None)),
        (lambda: broadcast(X, "cpu"), "give a list of devices"),
    ],
)
def test_a_wrong_type_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        call()


META: Any = torch.ones(1, device="meta")
HALVES: Any = [torch.empty(2, 2), torch.empty(2, 2)]
ABSENT = [] if torch.accelerator.is_available() else ["cuda", "cuda:0", "xpu:1", "mps"]


def run(module: nn.Module, *inputs: Any, **kwargs: Any) -> None:
    DataParallel(module, CPUS)(*inputs, **kwargs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: broadcast(X, CPUS, out=[X]), "exactly one of 'devices' and 'out'"),
        (lambda: broadcast(X), "exactly one of 'devices' and 'out'"),
        (lambda: broadcast(X, out=[X, X[None]]), r"out\[1\] has shape \(1, 4, 2\)"),
        (lambda: broadcast(X, out=[X.double()]), r"out\[0\] has dtype torch.float64"),
        (lambda: broadcast(X, ["cpu", -2]), r"devices\[1\] is -2"),
        (lambda: broadcast(X, out=[]), "out is empty"),
        (lambda: broadcast(X.clone().requires_grad_(), out=[X + 1]), r"torch\.no_grad"),
        (lambda: broadcast_coalesced([X], ["meta", "cpu"]), r"are on cpu, devices\[0\] is meta"),
        (lambda: broadcast_coalesced([X, META], ["cpu"]), r"tensors\[1\] has device meta"),
        (lambda: broadcast_coalesced([X], ["cpu"], 0), "buffer_size is 0"),
        (lambda: reduce_add([]), "inputs is empty"),
        (lambda: reduce_add([X, X, X[:3]]), r"inputs\[2\] has shape \(3, 2\), .* has \(4, 2\)"),
        (lambda: reduce_add([X, X.double()]), r"inputs\[1\] has dtype torch.float64, inputs\[0\]"),
        (lambda: reduce_add([X, X.to_sparse()]), r"inputs\[1\] has layout torch.sparse_coo, in"),
        (lambda: reduce_add_coalesced([[X, X], [X]]), r"inputs\[1\] has 1 tensors, .* has 2"),
        (lambda: reduce_add_coalesced([[X, X], [X, X[1:]]]), r"position 1 .* has shape \(3, 2\)"),
        (lambda: reduce_add_coalesced([]), "inputs is empty"),
        (lambda: reduce_add_coalesced([[X, META]]), r"inputs\[0\]\[1\] has device meta"),
        (lambda: scatter(X, ["cpu"] * 3, (2, 2)), "chunk_sizes has 2 entries, devices has 3"),
        (lambda: scatter(X, CPUS, (2, 1)), r"chunk_sizes is \[2, 1\], which sums to 3"),
        (lambda: scatter(X, CPUS, (-1, 5)), r"chunk_sizes is \[-1, 5\]"),
        (lambda: scatter(X, CPUS, out=HALVES), "exactly one of 'devices' and 'out'"),
        (lambda: scatter(X, []), "devices is empty"),
        (lambda: scatter(X, out=[]), "out is empty"),
        (lambda: scatter(X, out=[HALVES[0][None], HALVES[1]]), r"out\[0\] has shape \(1, 2, 2\)"),
        (lambda: scatter(X, out=[HALVES[0][:1], HALVES[1]]), r"sizes \[1, 2\] .* which sum to 3"),
        (lambda: scatter(X, chunk_sizes=[2, 2], out=HALVES), "chunk_sizes and out are given"),
        (lambda: scatter(torch.ones(()), CPUS), "the tensor has 0 dims"),
        (lambda: scatter(X, CPUS, dim=2), "dim is 2, the tensor has 2 dims"),
        (lambda: scatter(X.to_sparse(), CPUS), r"layout torch\.sparse_coo"),
        (lambda: scatter(X, CPUS, streams=[None]), "streams has 1 entries for 2 devices"),
        (lambda: gather([X, X], destination="cpu", out=X), "omit one of 'destination' and 'out'"),
        (lambda: gather([]), "tensors is empty"),
        (lambda: gather([X, X[None]]), r"tensors\[1\] has ndim 3, .* has 2"),
        (lambda: gather([X, X[:, 1:]]), r"tensors\[1\] has shape \(4, 1\), expected \(4, 2\)"),
        (lambda: gather([X, X[1:]], dim=-1), r"tensors\[1\] has shape \(3, 2\), expected \(4, 2\)"),
        (lambda: gather([X, X.double()]), r"tensors\[1\] has dtype torch.float64"),
        (lambda: gather([X, X], out=X + 1), r"out has shape \(4, 2\), the result has \(8, 2\)"),
        (lambda: gather([torch.ones(())] * 2, dim=1), "dim is 1, the tensor has 0 dims"),
        (lambda: broadcast(X, ["toaster"]), r"devices\[0\] is 'toaster'"),
        (lambda: broadcast(X, ["cpu", -1]), r"devices\[1\] is -1"),
        (lambda: reduce_add([X], 99), "destination is 99, this machine has . accelerators"),
        *((lambda d=d: broadcast(X, [d]), f"is '{d}', this machine has") for d in ABSENT),
        (lambda: DataParallel(nn.ReLU(), CPUS, buffers="last"), "buffers is 'last'"),  # type: ignore[arg-type]
        (lambda: run(nn.Linear(2, 2, device="meta"), X), "weight is on meta: move the module"),
        (lambda: run(nn.LazyLinear(2), X), "weight is not initialized"),
        (lambda: run(nn.Bilinear(2, 2, 1), X, X[:2]), r"inputs\[0\]\[1\] has size 2 .* has 4"),
        (lambda: run(nn.ReLU(), X, input=X[:2]), r"inputs\[1\]\['input'\] has size 2"),
    ],
)
def test_a_wrong_value_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_values_at_the_edge_are_accepted() -> None:
    assert reduce_add_coalesced([[], []]) == ()
    assert broadcast_coalesced([], CPUS) == [[], []]
    assert broadcast(X, ["meta", "cpu:1", "cpu"])[1] is X
    assert len(scatter(X, CPUS, streams=[None, None])) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([X, X[:1]])
    with pytest.raises(ArgumentError, match="tensor is a nested tensor"):
        scatter(nested, CPUS)
    with pytest.raises(ArgumentError, match=r"inputs\['x'\] is a nested tensor"):
        scatter_nested({"x": nested}, CPUS)
