"""Run a collective after the ranks have compared their calls.

With checks on, ranks exchange their call signatures first. On shm, unless checks are switched off,
a 64-bit hash of the signature, its *mark*, is sent in the header of the collective itself. If marks
differ, the collective raises on all ranks before any data is sent, and the ranks exchange
signatures. If the signatures differ only in which ranks require a gradient, the call is repeated
with a gradient on all ranks; otherwise an error names the difference. A call without a mark, such
as PyTorch's own on another rank, is compared by op, dtype and size only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.autograd.handles import Handle
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature, in_full, signature_hash
from gradwire.collectives.checks.consistency import CheckContext, Checked
from gradwire.collectives.wire.backends import backend_of
from gradwire.errors import CheckedMismatchError

T = TypeVar("T")

_WILL_EXCHANGE = 1
"""Lowest bit of a mark: set if the rank will exchange signatures after a mismatch.

Ranks compare the bit too: they exchange signatures only if all of them do.
"""


def run_checked(
    group: ProcessGroup,
    x: Tensor,
    check: bool | None,
    describe: Callable[[], CallSignature],
    run: Callable[[Tensor, CheckContext], T],
) -> T:
    """Run a call, after the ranks have compared it if checks are on or free of cost.

    Args:
        group: Process group.
        x: Tensor.
        check: Argument of the public function; see `checks`.
        describe: Function that returns the signature to compare.
        run: Function that runs the call, given the tensor and the context for its backward. Called
            a second time if it turns out that another rank requires a gradient.

    Raises:
        MismatchError: On every rank, if the ranks disagree.
    """
    requested = consistency.requested(check)
    if requested:
        x, context, _ = consistency.agree(group, x, describe())
        return run(x, context)
    if requested is False:
        return run(x, consistency.UNCHECKED)
    callee: Any = backend_of(group, x).python or group
    if not _sends_marks(callee):
        return run(x, consistency.UNCHECKED)
    # The number is part of the mark, so that the mark of a rank that is one call behind differs
    # even if the signatures are equal.
    call, number = describe(), consistency.next_number(group)

    def repeat() -> T:
        y, context, _ = consistency.agree(group, x, call)
        return run(y, context)

    try:
        with callee.marked(_mark(in_full(call), number) | _WILL_EXCHANGE):
            result = run(x, _Marked(group, call.op, number))
    except CheckedMismatchError:
        return repeat()
    if isinstance(result, Handle):  # a mismatch is raised by wait(), on all ranks
        handle: Any = result.retried(CheckedMismatchError, lambda: cast(Any, repeat()).wait())
        return cast(T, handle)
    return result


@dataclass(frozen=True)
class _Marked(Checked):
    """State of a call with a mark, whose backward has a mark too."""

    def backward(self, cotangent: Tensor) -> AbstractContextManager[None]:
        callee: Any = backend_of(self.group, cotangent).python or self.group
        if not _sends_marks(callee):
            return nullcontext()
        marked: AbstractContextManager[None] = callee.marked(
            _mark(CallSignature(f"backward of {self.call}", None, None), self.number)
            & ~_WILL_EXCHANGE
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
