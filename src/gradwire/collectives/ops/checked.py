"""Run a collective after ranks have compared their calls of it.

With checks on, ranks exchange their call signatures first. On shm, where nobody has switched checks
off, a 64-bit hash of the signature, its mark, is sent in the header of the collective itself. If
marks differ, the collective raises on all ranks before data is sent. Then they exchange signatures,
which either says what differs, or that only a gradient is wanted on some ranks, and the call is
repeated with one on all. A call without a mark, such as PyTorch's own on another rank, is compared
by op, dtype and size only.
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
"""A mark's lowest bit: after a mismatch its rank exchanges signatures, as all must or none."""


def run_checked(
    group: ProcessGroup,
    x: Tensor,
    check: bool | None,
    describe: Callable[[], CallSignature],
    run: Callable[[Tensor, CheckContext], T],
) -> T:
    """Run a call, after ranks have compared it if checks are on or cost nothing.

    Args:
        group: The group.
        x: The tensor.
        check: As the caller gave it; see `checks`.
        describe: Gives what the ranks compare.
        run: The call, with the context for its backward. It is called again if a gradient turns out
            to be wanted elsewhere.

    Raises:
        MismatchError: On every rank, if they disagree.
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
    # The number is part of the mark, so that a rank that is one call behind differs, although the
    # signatures are equal.
    call, number = describe(), consistency.next_number(group)

    def repeat() -> T:
        y, context, _ = consistency.agree(group, x, call)
        return run(y, context)

    try:
        with callee.marked(_mark(in_full(call), number) | _WILL_EXCHANGE):
            result = run(x, _Marked(group, call.op, number))
    except CheckedMismatchError:
        return repeat()
    if isinstance(result, Handle):  # the mismatch shows when it is waited for, on all ranks
        handle: Any = result.retried(CheckedMismatchError, lambda: cast(Any, repeat()).wait())
        return cast(T, handle)
    return result


@dataclass(frozen=True)
class _Marked(Checked):
    """Of a call that had a mark: its backward has one too."""

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
    """Whether the backend sends marks, and no observer, which would not know them, is set."""
    return hasattr(callee, "marked") and callee.observer is None


def _mark(call: CallSignature, number: int) -> int:
    if call.ragged:  # only of what is equal on all ranks: shm compares sizes itself
        shape = call.shape and call.shape[1:]
        call = call._replace(shape=shape, send=(), receive=())
    return hash((signature_hash(call), number)) | 2  # never 0, which says that there is no mark
