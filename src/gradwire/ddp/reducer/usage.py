"""Parameters that a backward uses: all, those in its graph, or those of the first backward.

A rank that does not use a parameter takes part with zeros. A parameter that no rank uses keeps its
gradient as it is. To detect this, ranks sum one integer per parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.ddp.options import ReducerOptions


def accumulation_node(parameter: Tensor) -> Any:
    """Return the node of autograd that accumulates a parameter's gradient.

    PyTorch finds the node through a view, whose type a subclass of Tensor may change.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter).node


class Usage:
    """Parameters used on this rank and on any rank.

    Args:
        parameters: Parameters of the reducer.
        nodes: Nodes that accumulate the parameters' gradients.
        options: Options of the reducer.

    Attributes:
        static: True if unused parameters are determined in the first backward only.
        find_unused: True if they are determined in each backward.
        nodes: Nodes that accumulate the parameters' gradients.
        touched: Parameters that got a gradient since the last reduction, including in `no_sync`.
        counts: Number of arrivals of each gradient, in a static graph from its first backward on.
        unused: Parameters known to be used on no rank.
    """

    def __init__(
        self, parameters: Sequence[Parameter], nodes: Sequence[Any], options: ReducerOptions
    ) -> None:
        self._count, self.nodes, self._parameters = len(nodes), nodes, parameters
        self.static = options.static_graph
        self.find_unused = options.find_unused_parameters and not self.static
        self.touched: set[int] = set()
        self.counts: dict[int, int] = {}
        self.unused: frozenset[int] = frozenset()

    @property
    def recording(self) -> bool:
        """True if the next backward is the first one of a static graph, which is recorded."""
        return self.static and not self.counts

    @property
    def allows_unused(self) -> bool:
        """True if a backward may leave out parameters."""
        return self.find_unused or self.recording

    def unused_in_graph(self) -> list[int] | None:
        """Return the parameters that the running backward leaves out.

        None in torch.autograd.grad of parameters, which leaves `.grad` as it is.
        """
        # 0.13 µs per node. Walking the graph from the outputs, as PyTorch does, would count
        # parameters as used even if the loss does not depend on their outputs
        will = torch._C._will_engine_execute_node
        try:
            return [i for i, node in enumerate(self.nodes) if not will(node)]
        except RuntimeError:
            return None

    def reaches_parameters(self) -> bool:
        """Return True if the running backward may produce a gradient of a parameter."""
        unused = self.unused_in_graph()
        # the graph of a reentrant checkpoint does not exist yet
        return unused is not None and (len(unused) < self._count or self.runs_all())

    @staticmethod
    def runs_all() -> bool:
        """Return True if the running backward continues from its current node to all leaves.

        `torch.autograd.grad` and `backward(inputs=...)` do not: they compute the gradients of some
        tensors only.
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
        """Return the parameters that got a gradient from another node than the registered one.

        `Module.to` with another dtype or device and `swap_tensors` keep the parameter, but give it
        a new node, which has none of the reducer's hooks.
        """
        left = ((i, self.nodes[i], self._parameters[i]) for i in indices)
        return [
            i
            for i, node, p in left
            if p.requires_grad and p.grad is not None and accumulation_node(p) is not node
        ]

    def record(self, arrived: Iterable[int]) -> None:
        """Record the number of arrivals of each gradient, for a static graph."""
        came = Counter(arrived)
        self.counts = {i: came[i] for i in range(self._count)}

    def forget(self) -> None:
        """Reset to the initial state, keeping accumulated gradients."""
        self.counts = {}
        self.unused = frozenset()

    def flags(self, used: Iterable[int]) -> Tensor:
        """Return a tensor with 1 for each parameter used on this rank since the last reduction."""
        mine = torch.zeros(self._count, dtype=torch.int32)
        # gradients cleared since then will not be reduced
        left = (i for i in self.touched if self.nodes[i].variable.grad is not None)
        if indices := list({*used, *left}):
            mine[indices] = 1
        return mine

    def receive(self, sums: Tensor) -> None:
        """Record the parameters that no rank used, from the sum of the ranks' flags."""
        self.unused = frozenset((sums == 0).nonzero().flatten().tolist())
        self.touched.clear()
