"""scatter and gather of nested containers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from gradwire.devices import gather_nested, register_container, scatter_kwargs, scatter_nested
from gradwire.errors import ArgumentError, NotSupportedError


class Pair:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


register_container(Pair, lambda p: (p.left, p.right), lambda _, new: Pair(*new))


def x() -> Tensor:
    return torch.arange(8.0).reshape(4, 2)


def test_other_values_are_passed_to_every_device_and_returned_as_lists() -> None:
    thing = object()
    parts = scatter_nested((x(), 3, "word", None, thing), ["cpu"] * 2)
    assert [p[1:] for p in parts] == [(3, "word", None, thing)] * 2
    assert gather_nested([(1, "a", None, 2.5), (2, "b", None, True)][:1] * 2, "cpu") == (
        [1, 1],
        ["a", "a"],
        None,
        [2.5, 2.5],
    )
    assert gather_nested([None, 3], "cpu") == [None, 3]
    assert scatter_nested("word", ["cpu"] * 3) == ["word"] * 3


def test_calls_without_tensors_reach_every_place() -> None:
    assert scatter_kwargs((), {}, ["cpu"] * 2) == (((), ()), ({}, {}))
    assert scatter_kwargs((1,), None, ["cpu"] * 2) == (((1,), (1,)), ({}, {}))


def test_other_dims() -> None:
    parts = scatter_nested([x(), x().unsqueeze(0)], ["cpu"] * 2, dim=-1)
    assert [p[0].shape for p in parts] == [(4, 1)] * 2
    assert torch.equal(gather_nested(parts, "cpu", dim=-1)[1], x().unsqueeze(0))


def test_scatter_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(ArgumentError, match=r"without a dim 0 to split"):
        scatter_nested([torch.tensor(1.0)], ["cpu"])
    with pytest.raises(ArgumentError, match=r"inputs\[0\] has layout torch.sparse_coo"):
        scatter_nested([x().to_sparse()], ["cpu"])
    packed = pack_padded_sequence(torch.zeros(3, 2, 1), torch.tensor([3, 2]))
    with pytest.raises(NotSupportedError, match="PackedSequence"):
        scatter_nested([packed], ["cpu"] * 2)
    with pytest.raises(ArgumentError, match="Pair, which is already registered"):
        register_container(Pair, lambda p: (), lambda p, _: p)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": 1}, {"b": 1, "a": 1}], r"outputs of replica 1 has keys \['b', 'a'\], that of"),
        ([[1, 2], [1]], r"of replica 1 has keys \[0\], that of replica 0 has \[0, 1\]"),
        ([{"a": x()}, {"a": 1}], r"outputs\['a'\] is a int from replica 1, a Tensor from"),
        ([[x()], (x(),)], "outputs is a tuple from replica 1, a list from replica 0"),
        ([None, (x(),)], "outputs is a tuple from replica 1, a NoneType from replica 0"),
        ([3, {"a": x()}], "outputs is a dict from replica 1, a int from replica 0"),
        ([], "outputs is empty"),
    ],
)
def test_gather_refuses_structures_that_differ(outputs: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gather_nested(outputs, "cpu")
