"""The hooks by which autograd tells that a parameter's gradient is ready.

To call one takes autograd 1.5 µs, as it makes Python objects of what came in: for thousands of tiny
gradients more than all the rest. Where nothing is sent before a backward has ended, it is early
enough to look then for what came. So parameters whose gradients lie in the last bucket from the
start, zeros that autograd adds to, have none once a backward has shown what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.nn import Parameter

__all__ = ["GradientHooks"]


class GradientHooks:
    """A hook at the node of each parameter; there it runs after all hooks of the parameter.

    Args:
        parameters: In the reducer's order.
        nodes: For each, the node that accumulates its gradient.
        on_gradient: Makes the hook for an index.
        silent: Filled with the indices of those that have none.

    Attributes:
        may_silence: Whether `silence` was not called yet, or not since `start_over`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        nodes: Sequence[Any],
        on_gradient: Callable[[int], Callable[..., None]],
        silent: set[int],
    ) -> None:
        self._parameters, self._nodes, self._on_gradient = parameters, nodes, on_gradient
        self._silent, self.may_silence = silent, True
        self._handles = [node.register_hook(on_gradient(i)) for i, node in enumerate(nodes)]

    def silence(self, indices: Iterable[int]) -> None:
        """Let these parameters have no hooks."""
        self.may_silence = False
        for i in indices:
            self._silent.add(i)  # first: a signal's handler may raise in between
            self._handles[i].remove()

    def restore(self, indices: Iterable[int] | None = None) -> list[int]:
        """Let these parameters, or all, have hooks from here on, for good.

        Returns:
            Those of them that had none.
        """
        restored = [*(self._silent if indices is None else self._silent.intersection(indices))]
        for i in restored:
            self._handles[i].remove()
            self._handles[i] = self._nodes[i].register_hook(self._on_gradient(i))
            self._silent.discard(i)
        return restored

    def start_over(self) -> None:
        """As after construction."""
        self.restore()
        self.may_silence = True

    def remove(self) -> None:
        """The reducer reduces no more."""
        self.may_silence = False
        for handle in self._handles:
            handle.remove()
