"""The result of a check: the same on all ranks, from the derivatives that all of them gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.errors import DistributedError, MismatchError
from gradwire.testing.store_gather import StoreGather

__all__ = ["GradientError", "check_same_options", "line", "raise_if_wrong"]

MAX_LINES = 8


class GradientError(DistributedError, AssertionError):
    """A derivative is wrong: the message names the rank, the input's entry, and both values.

    Every rank of the check raises it, with the same message.
    """


def check_same_options(store: StoreGather, fields: Mapping[str, Any]) -> None:
    """Raise on every rank unless all called the check with the same options."""
    gathered = store.all_gather(dict(fields))
    for name in sorted({name for options in gathered for name in options}):
        values = [options.get(name) for options in gathered]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError(f"{name} differs by rank ({each}): give the same on every rank")


def line(where: object, have: tuple[str, float], want: tuple[str, float]) -> str:
    """A line of the message: an entry, and both values of its derivative."""
    return f"{where}: {have[0]} {have[1]:.9g}, {want[0]} {want[1]:.9g}"


def raise_if_wrong(what: str, wrong: Sequence[str], count: int) -> None:
    """Raise `GradientError` if any entries differ, with the lines of the first few."""
    if not wrong:
        return
    shown = [f"  {text}" for text in wrong[:MAX_LINES]]
    if len(wrong) > MAX_LINES:
        shown.append(f"  … and {len(wrong) - MAX_LINES} more")
    head = f"{what}: {len(wrong)} of {count} entries differ"
    raise GradientError("\n".join([head, *shown]))
