"""The keyword arguments of every collective that has `async_op`, for its overloads.

Such a function has two overloads, so that type checkers know whether it returns its result or a
`Handle` of it. They unpack these TypedDicts, as PEP 692 has it; the function itself writes the
arguments out.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from torch.distributed import ProcessGroup

__all__ = ["Async", "Sync"]


class _Options(TypedDict, total=False):
    group: ProcessGroup | None
    check: bool | None


class Sync(_Options, total=False):
    """The options of a call that returns its result."""

    async_op: Literal[False]


class Async(_Options):
    """The options of a call that returns a handle: `async_op=True` is given."""

    async_op: Literal[True]
