"""One call of a collective: compared between the ranks, run, repeated if necessary, finished.

With checks on, ranks exchange their call signatures first. On shm, unless checks are switched off,
a 64-bit hash of the signature, its *mark*, is sent in the header of the collective itself. If marks
differ, the collective raises on all ranks before any data is sent, and the ranks exchange
signatures. If the signatures differ only in which ranks require a gradient, the call is repeated
with a gradient on all ranks; otherwise an error names the difference. A call without a mark, such
as PyTorch's own on another rank, is compared by op, dtype and size only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.consistency import UNCHECKED, CheckContext, Checked
from gradwire.collectives.handles import Handle
from gradwire.collectives.signature import CallSignature, PeerSignature, in_full, signature_hash
from gradwire.errors import CheckedMismatchError

_WILL_EXCHANGE = 1
"""Lowest bit of a mark: set if the rank will exchange signatures after a mismatch.

Ranks compare the bit too: they exchange signatures only if all of them do.
"""


class Plan(Protocol):
    """Plan of a call, made before anything is sent: a `LinearCollective`, or composed of such."""

    def apply(self, x: Tensor, context: CheckContext) -> Any:
        """Run the plan, differentiably in every mode."""

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Any]:
        """Start the plan; return a handle of its result."""


Peers = Sequence[PeerSignature] | None
"""Signatures of all ranks, if they exchanged them."""


class Operation:
    """One call of a collective, whose arguments are valid on this rank.

    Args:
        front: Tensor, with the split dim in front.
        group: Process group.
        signature: Function that returns the signature to compare.
        plan: Function that returns the plan for a tensor; it may exchange sizes.
        finish: Function that returns the call's result, given the plan and the plan's result.
    """

    __slots__ = ("finish", "front", "group", "plan", "signature")

    def __init__(
        self,
        front: Tensor,
        group: ProcessGroup,
        signature: Callable[[], CallSignature],
        plan: Callable[[Tensor, Peers], Plan],
        finish: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.front, self.group, self.signature = front, group, signature
        self.plan, self.finish = plan, finish

    def run(self, check: bool | None, async_op: bool = False) -> Any:
        """Compare the call if checks are on, or free of cost, and run it.

        Returns:
            The result, or a handle of it.

        Raises:
            MismatchError: On every rank, if the ranks disagree.
        """
        requested = consistency.requested(check)
        if requested:
            return self._run_agreed(self.signature(), async_op)
        if requested is None:
            callee: Any = wire.backend_of(self.group, self.front).python or self.group
            if _sends_marks(callee):
                return self._run_marked(callee, async_op)
        return self._execute(self.front, UNCHECKED, async_op)

    def _run_agreed(self, call: CallSignature, async_op: bool) -> Any:
        """Run after the ranks have exchanged their signatures."""
        x, context, peers = consistency.agree(self.group, self.front, call)
        return self._execute(x, context, async_op, peers)

    def _run_marked(self, callee: Any, async_op: bool) -> Any:
        """Run with a mark; exchange signatures and run again if the marks differ."""
        group, call = self.group, self.signature()
        # The number is part of the mark, so that the mark of a rank that is one call behind differs
        # even if the signatures are equal.
        number = consistency.next_number(group)
        try:
            with callee.marked(_mark(in_full(call), number) | _WILL_EXCHANGE):
                result = self._execute(self.front, _Marked(group, call.op, number), async_op)
        except CheckedMismatchError:
            return self._run_agreed(call, async_op)
        if not async_op:
            return result
        # A mismatch is raised by wait(), on all ranks.
        return result.retried(
            CheckedMismatchError, lambda: self._run_agreed(call, async_op=True).wait()
        )

    def _execute(
        self, x: Tensor, context: CheckContext, async_op: bool, peers: Peers = None
    ) -> Any:
        plan, finish = self.plan(x, peers), self.finish
        if async_op:
            handle = plan.apply_async(x, context)
            return handle if finish is None else handle.then(lambda y: finish(plan, y))
        result = plan.apply(x, context)
        return result if finish is None else finish(plan, result)


@dataclass(frozen=True)
class _Marked(Checked):
    """State of a call with a mark, whose backward has a mark too."""

    def backward(self, cotangent: Tensor) -> AbstractContextManager[None]:
        callee: Any = wire.backend_of(self.group, cotangent).python or self.group
        if not _sends_marks(callee):
            return nullcontext()
        call = CallSignature(f"backward of {self.call}", None, None)
        marked: AbstractContextManager[None] = callee.marked(
            _mark(call, self.number) & ~_WILL_EXCHANGE
        )
        return marked


def _sends_marks(callee: Any) -> bool:
    """Return True if the backend sends marks, and has no observer, which would not expect them."""
    return hasattr(callee, "marked") and callee.observer is None


def _mark(call: CallSignature, number: int) -> int:
    if call.ragged:  # leave out what may differ between ranks: shm compares sizes itself
        shape = call.shape and call.shape[1:]
        call = call._replace(shape=shape, send=(), receive=())
    return hash((signature_hash(call), number)) | 2  # never 0, which means that there is no mark
