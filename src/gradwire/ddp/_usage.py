"""Which parameters a backward uses: all of them, those its graph has, or those of the first one.

A rank that does not use a parameter takes part with zeros. What no rank uses keeps its gradient as
it is; for this, ranks add up one integer for each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from gradwire.ddp._group import message_device

__all__ = ["Usage"]


class Usage:
    """What one rank uses, and what all do.

    Args:
        count: How many parameters there are.
        nodes: The node of each that accumulates its gradient.
        group: The group.
        find_unused: Ask in each backward.
        static: Ask in the first one and rely on it.

    Attributes:
        group: The group; may be replaced.
        touched: Parameters that got a gradient since the last reduction, in `no_sync` too.
        counts: In a static graph, from its first backward on: how often each gradient arrives.
        unused: Parameters that no rank used, as far as is known.
    """

    def __init__(
        self,
        count: int,
        nodes: Sequence[Any],
        group: ProcessGroup,
        *,
        find_unused: bool,
        static: bool,
    ) -> None:
        self._count, self._nodes, self.group = count, nodes, group
        self.find_unused, self.static = find_unused and not static, static
        self.touched: set[int] = set()
        self.counts: dict[int, int] = {}
        self.unused: frozenset[int] = frozenset()
        self._sums: Tensor | None = None

    @property
    def recording(self) -> bool:
        """Whether the next backward is the one that a static graph goes by."""
        return self.static and not self.counts

    @property
    def tolerant(self) -> bool:
        """Whether parameters may be left out of a backward."""
        return self.find_unused or self.recording

    def absent(self) -> list[int]:
        """Parameters that the running backward's graph leaves out.

        Nothing if it leaves out all: then it is not a backward of parameters.
        """
        will = torch._C._will_engine_execute_node
        try:
            absent = [i for i, node in enumerate(self._nodes) if not will(node)]
        except RuntimeError:  # torch.autograd.grad of parameters, whose .grad stays as it is
            return []
        return absent if len(absent) < self._count else []

    def record(self, arrived: Iterable[int]) -> None:
        """Keeps how often each gradient arrived, for a static graph."""
        came = Counter(arrived)
        self.counts = {i: came[i] for i in range(self._count)}

    def forget(self) -> None:
        """As after construction."""
        self.counts = {}
        self.unused = frozenset()
        self.touched.clear()
        self._sums = None

    def send(self, used: Iterable[int]) -> tuple[Tensor, Work]:
        """Begins to add up what the ranks used."""
        mine = torch.zeros(self._count, dtype=torch.int32)
        if indices := list({*used, *self.touched}):
            mine[indices] = 1
        self._sums = mine.to(message_device(self.group))
        return self._sums, self.group.allreduce([self._sums], AllreduceOptions())

    def receive(self) -> None:
        """Takes what `send` has added up, once that has ended."""
        assert self._sums is not None
        self.unused = frozenset((self._sums == 0).nonzero().flatten().tolist())
        self._sums = None
        self.touched.clear()
