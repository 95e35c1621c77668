"""Checks that cost next to nothing, where an engine compares a number that goes with a collective.

A call's fingerprint, its mark, goes with the header of the collective that it makes. Only if marks
differ, which raises on all ranks, do they exchange what they are about to do, which says what
differs; or that there was no mistake, but a gradient that is wanted on another rank, and then the
call is made again. A call that has no mark, PyTorch's own on another rank say, is compared by what
the engine itself sees of it.
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
from gradwire.collectives.checks.call_signature import Call, fingerprint
from gradwire.collectives.checks.consistency import Note
from gradwire.collectives.wire.backends import behind
from gradwire.errors import CheckedMismatchError

__all__ = ["agreed"]

T = TypeVar("T")

_WILL_EXCHANGE = 1
"""A mark's lowest bit: whether its rank exchanges after a mismatch; all must, or none."""


def agreed(
    group: ProcessGroup,
    x: Tensor,
    check: bool | None,
    describe: Callable[[Tensor], Call],
    run: Callable[[Tensor, Note | None], T],
    *,
    alike: bool = True,
) -> T:
    """Run a call after ranks have agreed on it, if they are to.

    Args:
        group: The group.
        x: The tensor.
        check: The caller's; see `checks`.
        describe: What the ranks compare.
        run: The call, with the note for its backward. It is called again if a gradient turns out
            to be wanted elsewhere.
        alike: Whether calls look alike on all ranks, so that a number can stand for them.

    Raises:
        MismatchError: On every rank, if they disagree.
    """
    asked = consistency.asked_for(check)
    if asked:
        x, note, _ = consistency.agree(group, x, describe(x))
        return run(x, note)
    carrier = behind(group, x)
    if asked is not None or not alike or not _carries_marks(carrier):
        return run(x, None)
    call, number = describe(x), consistency.next_number(group)

    def again() -> T:
        y, note, _ = consistency.agree(group, x, call)
        return run(y, note)

    try:
        with carrier.marked(_mark(call, number) | _WILL_EXCHANGE):
            result = run(x, _Marked(group, call.op, number))
    except CheckedMismatchError:
        return again()
    if isinstance(result, Handle):  # the mismatch shows when it is waited for, on all ranks
        handle: Any = result.retried(CheckedMismatchError, lambda: cast(Any, again()).wait())
        return cast(T, handle)
    return result


@dataclass(frozen=True)
class _Marked(Note):
    """Of a call that was marked: its backward is marked too."""

    def backward(self, cotangent: Tensor) -> AbstractContextManager[None]:
        carrier = behind(self.group, cotangent)
        if not _carries_marks(carrier):
            return nullcontext()
        marked: AbstractContextManager[None] = carrier.marked(
            _mark(Call(f"backward of {self.call}", None, None), self.number) & ~_WILL_EXCHANGE
        )
        return marked


def _carries_marks(carrier: Any) -> bool:
    """Whether the engine has marks, and nobody follows what is sent, who would not know them."""
    return hasattr(carrier, "marked") and carrier.observer is None


def _mark(call: Call, number: int) -> int:
    return hash((fingerprint(call), number)) | 2  # no mark is 0
