"""Bytes that cross the memory bus, counted under a model of the cache, and what is allocated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.devices import broadcast_coalesced, reduce_add

LINE = 4 << 10
CACHE = 8 << 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A dispatch mode sees its own thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Bus(TorchDispatchMode):
    """Counts what ops read and write past a least-recently-used cache, and what they allocate.

    The first write to fresh memory is not read before: that is part of allocation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: OrderedDict[int, bool] = OrderedDict()
        self.moved = 0
        self.allocated = 0

    def touch(self, tensor: Tensor, write: bool) -> None:
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for line in range(start // LINE, -(-(start + size) // LINE)):
            if line not in self.lines and not write:
                self.moved += LINE
            self.lines[line] = self.lines.pop(line, False) or write
            if len(self.lines) > CACHE // LINE:
                _, dirty = self.lines.popitem(last=False)
                self.moved += LINE * dirty

    def flush(self) -> None:
        self.moved += LINE * sum(self.lines.values())
        self.lines.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        aliases = any(r.alias_info for r in schema.returns)
        copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        if aliases and not written:
            return result  # a view
        if not func.overloadpacket._qualified_op_name.startswith("aten::empty"):
            for name, value in named.items():
                if name in written and (copies or name == "out"):
                    continue
                for tensor in tensors(value):
                    self.touch(tensor, write=False)
            for name in written:
                for tensor in tensors(named[name]):
                    self.touch(tensor, write=True)
        if not aliases:
            for tensor in tensors(result):
                self.allocated += tensor.numel() * tensor.element_size()
                if not func.overloadpacket._qualified_op_name.startswith("aten::empty"):
                    self.touch(tensor, write=True)
        return result


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def counted(call: Callable[[], Any]) -> Bus:
    with Bus() as bus:
        result = call()
    bus.flush()
    del result
    return bus


@pytest.mark.parametrize("k", [2, 4, 8])
def test_reduce_add_reads_every_input_once_and_writes_the_result_once(k: int) -> None:
    size = 16 << 20
    inputs = [torch.ones(size // 4) for _ in range(k)]
    bus = counted(lambda: reduce_add(inputs))
    # A piece need not start at a line's edge: that line may be read twice.
    assert (k + 1) * size <= bus.moved <= (k + 1) * size * 1.01
    assert bus.allocated == size


@pytest.mark.parametrize("k", [1, 2, 4])
def test_broadcast_coalesced_reads_and_writes_once_per_copy(k: int) -> None:
    shapes = [1000, 3 << 20, 500_000, 17, 900_000]
    given = [torch.ones(n) for n in shapes]
    total = 4 * sum(shapes)
    bus = counted(lambda: broadcast_coalesced(given, ["cpu"] * k))
    assert bus.moved <= 2 * (k - 1) * total * 1.05
    assert bus.allocated == (k - 1) * total
