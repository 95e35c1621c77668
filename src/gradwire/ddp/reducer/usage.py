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
from torch.nn import Parameter


def accumulation_node(parameter: Tensor) -> Any:
    """Return the node of autograd that accumulates a parameter's gradient.

    PyTorch finds it by a view, which a subclass of Tensor may turn into something else.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter).node


class Usage:
    """What one rank uses, and what all do.

    Args:
        parameters: All.
        nodes: For each parameter, the node that accumulates its gradient.
        find_unused: Ask in each backward.
        static: Ask in the first one and rely on it.

    Attributes:
        nodes: The same.
        touched: Parameters that got a gradient since the last reduction, in `no_sync` too.
        counts: In a static graph, from its first backward on: how often each gradient arrives.
        unused: Parameters that no rank used, as far as is known.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        nodes: Sequence[Any],
        *,
        find_unused: bool,
        static: bool,
    ) -> None:
        self._count, self.nodes, self._parameters = len(nodes), nodes, parameters
        self.find_unused, self.static = find_unused and not static, static
        self.touched: set[int] = set()
        self.counts: dict[int, int] = {}
        self.unused: frozenset[int] = frozenset()

    @property
    def recording(self) -> bool:
        """Whether the next backward is the one that a static graph goes by."""
        return self.static and not self.counts

    @property
    def allows_unused(self) -> bool:
        """Whether parameters may be left out of a backward."""
        return self.find_unused or self.recording

    def unused_in_graph(self) -> list[int] | None:
        """Parameters that the running backward leaves out.

        None in torch.autograd.grad of parameters, whose .grad stays as it is.
        """
        # 0.13 µs a node; walking the graph, as PyTorch does, would count as used what lies below
        # outputs that the loss leaves out
        will = torch._C._will_engine_execute_node
        try:
            return [i for i, node in enumerate(self.nodes) if not will(node)]
        except RuntimeError:
            return None

    def reaches_parameters(self) -> bool:
        """Whether the running backward may bring a gradient of a parameter."""
        unused = self.unused_in_graph()
        # a reentrant checkpoint's graph is not there yet
        return unused is not None and (len(unused) < self._count or self.runs_all())

    @staticmethod
    def runs_all() -> bool:
        """Whether the running backward goes from the node it is at to all leaves.

        `torch.autograd.grad` and `backward(inputs=...)` do not: they are for the gradients of some
        tensors, and leave the others alone.
        """
        will = torch._C._will_engine_execute_node
        reached = [torch._C._current_autograd_node()]
        seen = set(reached)
        try:
            while reached:
                node = reached.pop()
                if not will(node):
                    return False
                below = {n for n, _ in node.next_functions if n is not None} - seen
                seen |= below
                reached += below
        except RuntimeError:  # a leaf of torch.autograd.grad
            return False
        return True

    def converted(self, indices: Iterable[int]) -> list[int]:
        """Those of the parameters that got a gradient from another node than the one known here.

        `Module.to`, for another dtype or device, and `swap_tensors` leave the parameter, and give
        it a new node: nothing tells of what arrives there.
        """
        left = ((i, self.nodes[i], self._parameters[i]) for i in indices)
        return [
            i
            for i, node, p in left
            if p.requires_grad and p.grad is not None and accumulation_node(p) is not node
        ]

    def record(self, arrived: Iterable[int]) -> None:
        """Keep how often each gradient arrived, for a static graph."""
        came = Counter(arrived)
        self.counts = {i: came[i] for i in range(self._count)}

    def forget(self) -> None:
        """As after construction, but for what has accumulated."""
        self.counts = {}
        self.unused = frozenset()

    def flags(self, used: Iterable[int]) -> Tensor:
        """One for each parameter that this rank used since the last reduction."""
        mine = torch.zeros(self._count, dtype=torch.int32)
        # gradients that were cleared since will not be reduced
        left = (i for i in self.touched if self.nodes[i].variable.grad is not None)
        if indices := list({*used, *left}):
            mine[indices] = 1
        return mine

    def receive(self, sums: Tensor) -> None:
        """Take the sum over ranks of their flags."""
        self.unused = frozenset((sums == 0).nonzero().flatten().tolist())
        self.touched.clear()
