"""Checks that cost next to nothing, where an engine compares a number that goes with a collective.

A call's fingerprint is put into the header of the collective that it makes. Only if that raises, on
all ranks, do they exchange what they are about to do, which says what differs; or that there was no
mistake, but a gradient that is wanted on another rank, and then the call is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import agreement
from gradwire.collectives.agreement import Note
from gradwire.collectives.fingerprint import Call, fingerprint
from gradwire.errors import MismatchError

__all__ = ["agreed"]

T = TypeVar("T")


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
    asked = agreement.asked_for(check)
    if asked:
        x, note, _ = agreement.agree(group, x, describe(x))
        return run(x, note)
    if asked is not None or not alike or not _carries_marks(group):
        return run(x, None)
    call, number = describe(x), agreement.next_number(group)
    _mark(group, call, number)
    try:
        return run(x, _Marked(group, call.op, number))
    except MismatchError:
        x, note, _ = agreement.agree(group, x, call)
        return run(x, note)
    finally:
        _unmark(group)


@dataclass(frozen=True)
class _Marked(Note):
    """Of a call that was marked: its backward is marked too."""

    def before_backward(self, cotangent: Tensor) -> None:
        if _carries_marks(self.group):
            _mark(self.group, Call(f"backward of {self.call}", None, None), self.number)


def _carries_marks(group: ProcessGroup) -> bool:
    """Whether the engine has marks, and nobody follows what is sent, who would not know them."""
    quick: Any = group
    return hasattr(group, "mark") and quick.observer is None


def _mark(group: ProcessGroup, call: Call, number: int) -> None:
    quick: Any = group
    quick.mark = hash((fingerprint(call), number))


def _unmark(group: ProcessGroup) -> None:
    quick: Any = group
    quick.mark = 0  # where nothing had to be sent
