"""Overloads of a process group's methods, such as `group.broadcast(tensor, 0)`.

torch's own groups resolve them in C++; a ProcessGroup written in Python must resolve them itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from gradwire.errors import ArgumentError, ArgumentTypeError

_TENSOR, _LIST, _LISTS = "a tensor", "a list", "a list of lists"
_DATA = (_TENSOR, _LIST, _LISTS)  # by depth
_OVERLOADS: dict[str, tuple[type[Any], str, str]] = {  # torch's arguments: with options, without
    "broadcast": (BroadcastOptions, "tensors", "tensor root timeout"),
    "allreduce": (AllreduceOptions, "tensors", "tensor op timeout"),
    "reduce": (ReduceOptions, "tensors", "tensor root op timeout"),
    "allgather": (
        AllgatherOptions,
        "output_tensors:2 input_tensors",
        "output_tensors:1 input_tensor timeout",
    ),
    "gather": (
        GatherOptions,
        "output_tensors:2 input_tensors",
        "output_tensors:1 input_tensor root timeout",
    ),
    "scatter": (
        ScatterOptions,
        "output_tensors input_tensors:2",
        "output_tensor input_tensors:1 root timeout",
    ),
    "reduce_scatter": (
        ReduceScatterOptions,
        "output_tensors input_tensors:2",
        "output input:1 op timeout",
    ),
    "barrier": (BarrierOptions, "", "timeout"),
}
_OPERATIONS = (
    *("broadcast", "allreduce", "allreduce_sparse", "reduce", "allgather", "all_gather_single"),
    *("all_gather_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv"),
    *("recv_anysource", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall_base"),
)
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def with_overloads(cls: type[Any]) -> type[Any]:
    """Add torch's overloads to the collectives of a class."""
    for name, (options, listed, plain) in _OVERLOADS.items():
        signatures = [_signature(f"{listed} opts", 1), _signature(plain, 0)]
        if name == "allreduce":
            signatures.append(_signature(f"{listed} op timeout", 1))
        setattr(cls, name, _dispatching(name, options, signatures, getattr(cls, name)))
    return cls


def with_awaited_tensors(cls: type[Any]) -> type[Any]:
    """Let a class's operations accept pending results of functional collectives."""
    for name in _OPERATIONS:
        setattr(cls, name, _awaiting(getattr(cls, name)))
    return cls


def _awaiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ArgumentError:  # raised before anything is sent: a pending result has no memory
            awaited = [_awaited(arg) for arg in args]
            if all(new is old for new, old in zip(awaited, args, strict=True)):
                raise
        return method(self, *awaited, **kwargs)

    return call


def _awaited(value: Any) -> Any:
    """Return a tensor, or nested lists of tensors, after waiting for pending results."""
    if isinstance(value, list):
        new = [_awaited(v) for v in value]
        return value if all(n is v for n, v in zip(new, value, strict=True)) else new
    return value.trigger_wait() if hasattr(value, "trigger_wait") else value


def _signature(text: str, depth: int) -> Signature:
    """Return the signature for a line of `_OVERLOADS`; annotations are the arguments' kinds.

    Args:
        text: Names of arguments; "name:1" is a list of tensors, "name:2" a list of lists.
        depth: Depth of tensor arguments without a number.
    """
    parameters = []
    for word in text.split():
        name, _, own_depth = word.partition(":")
        optional = name in ("opts", "op", "timeout")
        is_data = name not in _FIELDS and name != "opts"
        parameters.append(
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=None if optional else Parameter.empty,
                annotation=_DATA[int(own_depth or depth)] if is_data else name,
            )
        )
    return Signature(parameters)


def _dispatching(
    name: str, options: type[Any], signatures: list[Signature], method: Callable[..., Any]
) -> Callable[..., Any]:
    count = len(signatures[0].parameters) - 1  # without opts
    usual = {(list,) * count, (*(list,) * count, options)}

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch itself passes lists and options: skip the search through the overloads
        if not kwargs and tuple(map(type, args)) in usual:
            return method(self, *args)
        for each in signatures:
            try:
                given = each.bind(*args, **kwargs).arguments
            except TypeError:
                continue
            if all(_is(each.parameters[key].annotation, options, x) for key, x in given.items()):
                return method(self, *_as_lists(given, signatures[0], options))
        shown = " or ".join(f"{name}({', '.join(each.parameters)})" for each in signatures)
        raise ArgumentTypeError(f"the arguments of {name} fit none of: {shown}")

    return call


def _is(what: str, options: type[Any], value: object) -> bool:
    if what == _TENSOR:
        return isinstance(value, Tensor)
    if what in (_LIST, _LISTS):
        is_list = isinstance(value, list | tuple)
        return is_list and (not value or _holds_lists(value) == (what == _LISTS))
    if what == "op":
        return isinstance(value, (ReduceOp, ReduceOp.RedOpType))
    if what == "root":
        return isinstance(value, int)
    return value is None or isinstance(value, options if what == "opts" else timedelta)


def _as_lists(given: dict[str, Any], listed: Signature, options: type[Any]) -> list[Any]:
    """Return the arguments for the overload with lists and options."""
    opts = given.get("opts") or options()
    for name, field in _FIELDS.items():
        if given.get(name) is not None:
            setattr(opts, field, given[name])
    data = [value for name, value in given.items() if name not in _FIELDS and name != "opts"]
    wanted = [p.annotation for p in listed.parameters.values() if p.name != "opts"]
    return [*(_deep(x, what) for x, what in zip(data, wanted, strict=True)), opts]


def _deep(value: Any, what: str) -> list[Any]:
    if isinstance(value, Tensor):
        return [value]
    return [list(value)] if what == _LISTS and not _holds_lists(value) else list(value)


def _holds_lists(value: object) -> bool:
    """Return True for a list of lists."""
    return isinstance(value, list | tuple) and any(isinstance(x, list | tuple) for x in value)
