"""Numbers that ranks sum beside gradients: weights, counts of forwards, flags of used parameters.

With weights, each backward counts by its number of samples or tokens. A gradient is multiplied by
the weight before it is accumulated, so that `.grad` holds Σ n g of this rank's backwards. The sum
of n over ranks is sent with the gradients: after those of a bucket, or in the vote that ends a
hook's backward. The buckets of a hook that is not linear are weighted before the hook is called.
For this, the sum is sent in a separate message before the first bucket. With a hook, nothing is
sent for weights if no rank gave one in the hook's first backward. `weighted_average` in
`tests/ddp/naive.py` computes the same without buckets.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire._groups import WEIGHTS
from gradwire.ddp.arguments import ReducerOptions, WeakHook, remove_hooks_with
from gradwire.ddp.buckets.ownership import is_zero
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    NotSupportedError,
    ReductionError,
)

NO_BUCKET = (
    "there is no bucket of float32 or float64, in which ranks agree on weight(n) and on backwards "
    "around the wrapper: register_comm_hook(None, 'all_reduce')"
)
NOT_SENT = (
    "with this communication hook, ranks agree on weight(n) and on backwards around the wrapper "
    "only if there was one in the hook's first backward: register_comm_hook again on all ranks"
)
MODULUS = 64
"""Modulus of the counts sent: float32 then adds their squares over 4,096 ranks exactly."""


@dataclass(eq=False)
class Forward:
    """One forward. The nodes of its outputs reference it, so it lives as long as its graph."""

    number: int


class Forwards:
    """Counter of skipped forwards: a backward reached a later forward, but never these."""

    # A rank that continues with its next batch after a forward, for instance because its loss is
    # NaN, is a step ahead of the others from then on. Forwards that a program runs only for their
    # result are not counted: a forward before the first reduction, one whose outputs are released
    # before the next forward ends (the loss of a step is still in a variable then), and one whose
    # outputs are kept until after the step. If a program chooses among several forwards, ranks skip
    # different numbers of forwards, but run equally many: ranks are in different steps only if both
    # numbers differ.

    def __init__(self) -> None:
        # `skipped`: forwards skipped in the steps reduced so far
        self.skipped = self._last = self._reached = self._first = 0
        # number of the running backward among those whose forward went around the wrapper; else 0
        self.around = self._arounds = 0
        self._open: dict[int, weakref.ref[Forward]] = {}
        self._counting = False

    def begin(self) -> Forward:
        """Record a forward with outputs at which a backward may begin."""
        if self._open:
            self._open = {n: ref for n, ref in self._open.items() if ref() is not None}
        self._last += 1
        forward = Forward(self._last)
        self._open[self._last] = weakref.ref(forward)
        return forward

    def reach(self, number: int) -> None:
        """Record that a backward has reached an output of a forward."""
        if self._open.pop(number, None) is not None:
            self._reached = max(self._reached, number)

    def go_around(self) -> None:
        """Record a backward whose forward went around the wrapper."""
        self.around = self._arounds % MODULUS + 1

    @property
    def begun(self) -> int:
        """Number of forwards begun since the first reduction."""
        return self._last - self._first if self._counting else 0

    def count(self) -> tuple[int, int, int]:
        """Return the numbers to send: forwards known to be skipped, `around`, and all forwards."""
        if not self._counting:
            return 0, self.around, 0
        return (self.skipped + self._gone()) % MODULUS, self.around, self.begun % MODULUS

    def commit(self) -> None:
        """Record that the backward was reduced."""
        if self._counting:
            self.skipped += self._gone()
        else:
            self._counting, self._first = True, self._last
        self._open.clear()
        self._arounds = self.around or self._arounds

    def _gone(self) -> int:
        # a forward whose outputs are still referenced may be part of the loss
        return sum(ref() is None for number, ref in self._open.items() if number < self._reached)


class Tally(NamedTuple):
    """One rank's numbers, or their sums over the ranks."""

    # They are sent after the gradients of a float32 or float64 bucket, in its dtype, or in a
    # separate message, in float64. The default dtype is not used: in bfloat16, 300 ranks count as
    # 296 or 304, and in float16 a weight of 70,000 is infinite. Sums of integers over the ranks
    # must stay below 2**24, from where float32 rounds them. A rank that takes part in a backward
    # with zero gradients adds zeros.

    # of the accumulated gradients
    weight: float = 0.0
    # 1 on a rank that gave a weight
    weighted: float = 0.0
    # 1 on a rank that takes part and gave none
    unweighted: float = 0.0
    # training forwards that no backward has reached, see `Forwards`
    skipped: float = 0.0
    skipped_squared: float = 0.0
    # backwards whose forward went around the wrapper, if this is one
    around: float = 0.0
    around_squared: float = 0.0
    # all training forwards
    begun: float = 0.0
    begun_squared: float = 0.0

    @property
    def in_step(self) -> bool:
        """True if all ranks that take part have skipped, or begun, the same number of forwards."""
        ranks = self.weighted + self.unweighted
        return (
            ranks * self.skipped_squared == self.skipped**2
            or ranks * self.begun_squared == self.begun**2
        )

    @property
    def same_way(self) -> bool:
        """True if the forwards of all ranks that take part went around the wrapper, or none."""
        return (self.weighted + self.unweighted) * self.around_squared == self.around**2

    def message(self, *before: float) -> Tensor:
        """Return the numbers as a separate message, after the given ones."""
        return torch.tensor([*before, *self], dtype=torch.float64)

    def write(self, extra: Tensor) -> None:
        """Write the numbers to the extra elements of a bucket."""
        if extra.is_cpu:
            kind = "f" if extra.dtype is torch.float32 else "d"
            # 0.8 µs; torch.tensor takes 2.2
            extra.copy_(torch.frombuffer(array(kind, self), dtype=extra.dtype))
            return
        # a copy from the host would wait for the accelerator, and a CUDA graph cannot hold one
        if self[:-2] == Tally(unweighted=1.0)[:-2]:  # the usual case: a launch instead of seven
            extra.copy_(_usual(extra.device, extra.dtype)[int(self.begun)])
            return
        extra.zero_()
        for at, number in enumerate(self):
            if number:
                extra[at].fill_(number)

    @classmethod
    def read(cls, sums: Tensor) -> Tally:
        """Return the numbers in a bucket's extra elements, or in a message's last ones."""
        return cls(*sums.tolist()[-len(cls._fields) :])


@lru_cache(maxsize=64)
def _usual(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a rank that gave no weight and skipped nothing, by `begun`."""
    rows = [Tally(unweighted=1.0, begun=n, begun_squared=n**2) for n in range(MODULUS)]
    return torch.tensor(rows, dtype=dtype, device=device)


class Weights:
    """Weights of one rank's gradients."""

    # ends the backward on every rank, and raises
    fail: Callable[[Exception], NoReturn]

    def __init__(self, parameters: Sequence[Parameter], nodes: Sequence[Any]) -> None:
        self._parameters, self._nodes = parameters, nodes
        self._lock = threading.Lock()  # autograd runs one thread per device
        self._handles: list[Any] = []
        # weight of arriving gradients; None for 1, and then no rank may give a weight
        self.given: float | None = None
        # sum of the weights whose gradients have accumulated since the last reduction
        self.total = 0.0
        self._used = self._counted = False  # by a backward; in the total
        self._exchanged = False  # its backward has received cotangents of other ranks
        self._accumulated: set[int] = set()
        # memory and version of the first gradient show whether gradients were cleared: reading the
        # values of all would cost a pass
        self._sampled, self._sampled_version = 0, (0, 0)
        # the module's forward runs: a backward within it is this rank's own and has no weight
        self.within = False

    def give(self, weight: float) -> None:
        """Set the weight of the next backward."""
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise ArgumentTypeError(
                f"weight is {weight!r}: pass an int or a float, such as a tensor's .item()"
            )
        if not 0 <= weight < math.inf:
            raise ArgumentError(f"weight is {weight}: pass a finite number that is 0 or more")
        self.given = float(weight)
        self._used = self._counted = self._exchanged = False
        WEIGHTS.add(self)
        if not self._handles:
            for i, node in enumerate(self._nodes):
                self._handles.append(node.register_prehook(WeakHook(self._on_incoming, i)))
                self._handles.append(node.register_hook(WeakHook(self._on_accumulated, i)))
            remove_hooks_with(self, self._handles)

    def of_backward(self) -> float | None:
        """Return the factor of the running backward's gradients; None if it is not applied."""
        # called where ranks exchange cotangents, which must carry the sender's weight
        if self.given is None or self.within:
            return None
        will = torch._C._will_engine_execute_node
        try:
            if not any(will(node) for node in self._nodes):
                return None
        except RuntimeError:  # torch.autograd.grad of parameters
            return None
        self._exchanged = True
        return self.given

    def on_forward(self) -> None:
        """Forget a weight that a backward has used, as it does not apply to the next forward."""
        # a forward within a backward belongs to a checkpoint, and has the backward's weight
        if self._used and torch._C._current_graph_task_id() == -1:
            self.given = None

    def skip(self) -> None:
        """Give the last forward, which is left out, no weight; earlier ones keep theirs."""
        if self.given is not None or self.total:
            self.given, self._counted = 0.0, False

    def clear(self) -> None:
        """Reset the sum after gradients were reduced or discarded."""
        self.total, self._counted = 0.0, False
        self._accumulated.clear()

    def on_backward(self) -> None:
        """Count the weight of a backward, whose forward may have used no parameter."""
        self.count()
        self._used = self.given is not None

    def tally(self, *counts: int) -> Tally:
        """Return this rank's summands: its weight, and the numbers of `Forwards.count`."""
        forwards = [n for count in counts for n in (count, count**2)]
        if self.given is None:
            return Tally(0.0, 0.0, 1.0, *forwards)
        self.count()
        return Tally(self.total, 1.0, 0.0, *forwards)

    def factor(self, sums: Tally, ranks: int) -> float | None:
        """Return the factor of gradients that were summed and divided by `ranks`; None for 1."""
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
        return ranks / total if total else 0.0  # if all weights are 0, so are the gradients

    def _on_incoming(
        self, index: int, incoming: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """Return the weighted gradient to accumulate; None to accumulate it unchanged."""
        if self.within and (index not in self._accumulated or self._is_cleared(index)):
            return None
        weight = None if self.within else self.given
        if weight is None:
            if self._accumulated and not self._forget_if_cleared():
                self.fail(
                    ReductionError(
                        "no weight was given for this backward, while .grad holds weighted "
                        "gradients of earlier ones: call weight(n) before each backward, and "
                        "clear .grad before a backward within forward"
                    )
                )
            return None
        self.on_backward()
        gradient = incoming[0]
        if gradient is None:
            return None
        if index not in self._accumulated:
            held = self._parameters[index].grad
            if held is not None and not is_zero(held):
                self.fail(
                    NotSupportedError(
                        "weight(n), and .grad holds gradients that were reduced before or got no "
                        "weight: call zero_grad() after each reduction, accumulate under "
                        "no_sync(), and call weight(n) before each backward"
                    )
                )
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
        if not weight and self._exchanged and not is_zero(gradient):
            self.fail(
                NotSupportedError(
                    "weight(0) for samples whose backward exchanges cotangents with other ranks "
                    "(SyncBatchNorm, collectives): theirs would be lost. Pass a batch without "
                    "samples, or leave the batch out on all ranks (skip_if_any)"
                )
            )
        # the mean over no samples is NaN, and so is 0 * NaN
        return (gradient * weight if weight else torch.zeros_like(gradient),)

    def _on_accumulated(self, index: int, *_: object) -> None:
        """Record the version of the sampled gradient after it was accumulated."""
        gradient = self._parameters[index].grad
        if index == self._sampled and gradient is not None and not self.within:
            self._sampled_version = _version(gradient)

    def count(self) -> None:
        """Add the weight to the total, once per given weight."""
        with self._lock:
            if self._counted or self.given is None:
                return
            self._forget_if_cleared()
            self.total += self.given
            self._counted = True

    def _forget_if_cleared(self) -> bool:
        """Forget accumulated gradients if they were cleared. Return True if none are left."""
        # gradients whose computed values are zero count: their memory has not been written to
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
        return is_zero(gradient)


def _version(gradient: Tensor) -> tuple[int, int]:
    """Return a value that changes when a gradient is replaced or written to."""
    dense = gradient.layout == torch.strided
    return gradient.data_ptr() if dense else 0, gradient._version


def accumulation_node(parameter: Tensor) -> Any:
    """Return the node of autograd that accumulates a parameter's gradient."""
    # PyTorch finds the node through a view, whose type a subclass of Tensor may change.
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter).node


class Usage:
    """Parameters used on this rank and on any rank."""

    def __init__(
        self, parameters: Sequence[Parameter], nodes: Sequence[Any], options: ReducerOptions
    ) -> None:
        # nodes accumulate the parameters' gradients
        self._count, self.nodes, self._parameters = len(nodes), nodes, parameters
        # static: unused parameters are determined in the first backward only; find_unused: in each
        self.static = options.static_graph
        self.find_unused = options.find_unused_parameters and not self.static
        # parameters that got a gradient since the last reduction, including in `no_sync`
        self.touched: set[int] = set()
        # number of arrivals of each gradient, in a static graph from its first backward on
        self.counts: dict[int, int] = {}
        # parameters known to be used on no rank
        self.unused: frozenset[int] = frozenset()
        # ranks may use different ones
        self.differs = self.find_unused

    @property
    def recording(self) -> bool:
        """True if the next backward is the first one of a static graph, which is recorded."""
        return self.static and not self.counts

    @property
    def allows_unused(self) -> bool:
        """True if a backward may leave out parameters."""
        return self.find_unused or self.recording

    def unused_in_graph(self) -> list[int] | None:
        """Return the parameters that the running backward leaves out."""
        # 0.13 µs per node. Walking the graph from the outputs, as PyTorch does, would count
        # parameters as used even if the loss does not depend on their outputs
        will = torch._C._will_engine_execute_node
        try:
            return [i for i, node in enumerate(self.nodes) if not will(node)]
        except RuntimeError:  # torch.autograd.grad of parameters, which leaves `.grad` as it is
            return None

    def reaches_parameters(self) -> bool:
        """Return True if the running backward may produce a gradient of a parameter."""
        unused = self.unused_in_graph()
        # the graph of a reentrant checkpoint does not exist yet
        return unused is not None and (len(unused) < self._count or self.runs_all())

    @staticmethod
    def runs_all() -> bool:
        """Return True if the running backward continues from its current node to all leaves."""
        # `torch.autograd.grad` and `backward(inputs=...)` do not: they compute some gradients only
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
        """Return the parameters that got a gradient from another node than the registered one."""
        # `Module.to` with another dtype or device and `swap_tensors` keep the parameter, but give
        # it a new node, which has none of the reducer's hooks.
        left = ((i, self.nodes[i], self._parameters[i]) for i in indices)
        return [
            i
            for i, node, p in left
            if p.requires_grad and p.grad is not None and accumulation_node(p) is not node
        ]

    @property
    def accumulated(self) -> list[int]:
        """Parameters whose gradients have accumulated and were not cleared since."""
        return [i for i in self.touched if self._parameters[i].grad is not None]

    def flags(self, used: Iterable[int]) -> Tensor:
        """Return a tensor with 1 for each parameter used on this rank since the last reduction."""
        mine = torch.zeros(self._count, dtype=torch.int32)
        if indices := list({*used, *self.accumulated}):
            mine[indices] = 1
        return mine

    def set_unused(self, flags: Tensor, ranks: int) -> None:
        """Set the parameters that no rank used, from the sums of `flags`."""
        self.unused = frozenset((flags == 0).nonzero().flatten().tolist())
        self.differs = self.find_unused or bool((flags % ranks).any())
