"""Arguments of types that cannot be used are named, whatever the op."""

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
        (lambda: broadcast_coalesced([X], CPUS, 1e6), "buffer_size is 1000000.0"),  # type: ignore[arg-type]
        (lambda: reduce_add(BAD), "inputs is a NoneType"),
        (lambda: reduce_add([X, X], out=BAD or 3), "out is a int"),  # type: ignore[arg-type]
        (lambda: reduce_add_coalesced([X, X]), r"inputs\[0\] is a tensor"),
        (lambda: gather({"a": X}), r"tensors\[0\] is a str"),  # type: ignore[dict-item]
        (lambda: gather([X], out=3), "out is a int"),  # type: ignore[arg-type]
        (lambda: DataParallel(torch.sin), "module is a builtin_function_or_method"),  # type: ignore[type-var]
        (lambda: DataParallel(nn.ReLU(), dim="0"), "dim is '0', a str"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([X, X[:1]])
    with pytest.raises(ArgumentError, match="tensor is a nested tensor"):
        scatter(nested, CPUS)
    with pytest.raises(ArgumentError, match=r"inputs\['x'\] is a nested tensor"):
        scatter_nested({"x": nested}, CPUS)


def test_lists_with_constructors_of_their_own() -> None:
    class Named(list[Any]):
        def __init__(self, name: str, values: list[Any]) -> None:
            super().__init__(values)
            self.name = name

    given = Named("rows", [X])
    parts = scatter_nested(given, CPUS)
    assert [(type(p), p.name, len(p[0])) for p in parts] == [(Named, "rows", 2)] * 2
    assert len(given[0]) == 4
