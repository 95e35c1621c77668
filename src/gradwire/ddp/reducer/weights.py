"""Weighted averages: each backward counts by its number of samples or tokens.

A gradient is multiplied by the weight before it is accumulated, so that `.grad` holds Σ n g of this
rank's backwards. The sum of n over ranks is sent with the gradients: after those of a bucket, or in
the vote that ends a hook's backward. The buckets of a hook that is not linear are weighted before
the hook is called. For this, the sum is sent in a separate message before the first bucket, in each
backward, because no rank knows whether others have weights. `weighted_average` in `naive.py`
computes the same without buckets.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.ddp.hook_handles import WeakHook, remove_hooks_with
from gradwire.ddp.reducer.tally import Tally
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSupportedError,
    ReductionError,
)

NO_WEIGHTS_BUCKET = (
    "weight(n): the weights travel with a bucket of float32 or float64, and there is none, or with "
    "the vote that follows a communication hook: register_comm_hook(None, 'all_reduce')"
)


class Weights:
    """Weights of one rank's gradients.

    Args:
        parameters: Parameters of the reducer.
        nodes: Nodes that accumulate the parameters' gradients.

    Attributes:
        fail: Function that ends the backward on every rank, and raises.
        given: Weight of arriving gradients; None for 1, and then no rank may give a weight.
        total: Sum of the weights whose gradients have accumulated since the last reduction.
    """

    fail: Callable[[Exception], NoReturn]

    def __init__(self, parameters: Sequence[Parameter], nodes: Sequence[Any]) -> None:
        self._parameters, self._nodes = parameters, nodes
        self._lock = threading.Lock()  # autograd runs one thread per device
        self._handles: list[Any] = []
        self.given: float | None = None
        self.total = 0.0
        self._used = self._counted = False  # by a backward; in the total
        self._accumulated: set[int] = set()
        # memory and version of the first gradient show whether gradients were cleared: reading the
        # values of all would cost a pass
        self._sampled, self._sampled_version = 0, (0, 0)

    def give(self, weight: float) -> None:
        """Set the weight of the next backward."""
        self.given = check_weight(weight)
        self._used = self._counted = False
        if not self._handles:
            for i, node in enumerate(self._nodes):
                self._handles.append(node.register_prehook(WeakHook(self._on_incoming, i)))
                self._handles.append(node.register_hook(WeakHook(self._on_accumulated, i)))
            remove_hooks_with(self, self._handles)

    @property
    def in_use(self) -> bool:
        """True if a weight was ever given on this rank."""
        return bool(self._handles)

    def on_forward(self) -> None:
        """Forget a weight that a backward has used, as it does not apply to the next forward.

        A forward within a backward belongs to a checkpoint, and has the backward's weight.
        """
        if self._used and torch._C._current_graph_task_id() == -1:
            self.given = None

    def clear(self) -> None:
        """Reset the sum after gradients were reduced or discarded."""
        self.total, self._counted = 0.0, False
        self._accumulated.clear()

    def on_backward(self) -> None:
        """Count the weight of a backward, whose forward may have used no parameter."""
        self._count()
        self._used = self.given is not None

    def on_constant(self) -> None:
        """Count the weight of a forward that cannot have a backward: its gradients are zero."""
        self._count()

    def tally(self, skipped: int = 0, begun: int = 0) -> Tally:
        """Return this rank's summands: its weight, and the numbers of its forwards."""
        forwards = skipped, skipped**2, begun, begun**2
        if self.given is None:
            return Tally(0.0, 0.0, 1.0, *forwards)
        self._count()
        return Tally(self.total, 1.0, 0.0, *forwards)

    def factor(self, sums: Tally, ranks: int) -> float | None:
        """Return the factor of gradients that were summed and divided by `ranks`; None for 1.

        If all weights are 0, the gradients are 0.
        """
        total, weighted, unweighted = sums.weight, sums.weighted, sums.unweighted
        if weighted and unweighted:
            self.fail(
                MismatchError(
                    f"{weighted:g} ranks called weight(n) for this backward and {unweighted:g} did "
                    "not: call it on every rank, or on none"
                )
            )
        if not weighted:
            return None
        return ranks / total if total else 0.0

    def _on_incoming(
        self, index: int, incoming: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """Return the weighted gradient to accumulate; None to accumulate it unchanged."""
        weight = self.given
        if weight is None:
            if self._accumulated and not self._forget_if_cleared():
                self.fail(
                    ReductionError(
                        "no weight was given for this backward, while .grad holds weighted "
                        "gradients of earlier ones: call weight(n) before each backward"
                    )
                )
            return None
        self.on_backward()
        gradient = incoming[0]
        if gradient is None:
            return None
        if index not in self._accumulated:
            self._check_first(index)
            if not self._accumulated:
                self._sampled = index
            self._accumulated.add(index)
        if torch.is_grad_enabled():
            self.fail(
                NotSupportedError(
                    "weight(n) and backward(create_graph=True): use torch.autograd.grad for "
                    "gradients that are differentiated again"
                )
            )
        if weight == 1.0:
            return None
        # the mean over no samples is NaN, and so is 0 * NaN
        return (gradient * weight if weight else torch.zeros_like(gradient),)

    def _on_accumulated(self, index: int, *_: object) -> None:
        """Record the version of the sampled gradient after it was accumulated."""
        gradient = self._parameters[index].grad
        if index == self._sampled and gradient is not None:
            self._sampled_version = _version(gradient)

    def _count(self) -> None:
        """Add the weight to the total, once per given weight."""
        with self._lock:
            if self._counted or self.given is None:
                return
            self._forget_if_cleared()
            self.total += self.given
            self._counted = True

    def _forget_if_cleared(self) -> bool:
        """Forget accumulated gradients if they were cleared. Return True if none are left.

        Gradients whose computed values are zero count: their memory has not been written to.
        """
        if self._accumulated and all(map(self._is_cleared, (self._sampled, *self._accumulated))):
            self.total = 0.0
            self._accumulated.clear()
        return not self._accumulated

    def _is_cleared(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        if gradient is None:
            return True
        if index == self._sampled and _version(gradient) == self._sampled_version:
            return False
        return _is_zero(gradient)

    def _check_first(self, index: int) -> None:
        """Raise if the first weighted gradient since a reduction would be added to another one."""
        gradient = self._parameters[index].grad
        if gradient is not None and not _is_zero(gradient):
            self.fail(
                NotSupportedError(
                    "weight(n), and .grad holds gradients that were reduced before or got no "
                    "weight: call zero_grad() after each reduction, accumulate under no_sync(), "
                    "and call weight(n) before each backward"
                )
            )


def check_weight(weight: object) -> float:
    """Return the weight as a float.

    Raises:
        ArgumentTypeError: The weight is not a number.
        ArgumentError: The weight is negative, infinite or NaN.
    """
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise ArgumentTypeError(
            f"weight is {weight!r}: pass an int or a float, such as a tensor's .item()"
        )
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentError(f"weight is {weight}: pass a finite number that is 0 or more")
    return value


def _version(gradient: Tensor) -> tuple[int, int]:
    """Return a value that changes when a gradient is replaced or written to."""
    dense = gradient.layout == torch.strided
    return gradient.data_ptr() if dense else 0, gradient._version


def _is_zero(gradient: Tensor) -> bool:
    values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
    return not bool(values.any())
