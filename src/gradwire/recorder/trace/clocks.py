"""Offsets of ranks' clocks to rank 0's: zero on one host, measured by round trips between hosts."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from torch.distributed import Store

from gradwire._processes import boot_id

_TRIPS = 16
_TIME = struct.Struct("<q")


@dataclass(frozen=True)
class Offset:
    """Offset to add to a rank's times, with its error.

    Attributes:
        ns: Offset.
        error_ns: Maximum error, half of the shortest round trip.
    """

    ns: int
    error_ns: int


def this_clock() -> str:
    """Return a name that is equal for processes with the same CLOCK_MONOTONIC, the kernel's."""
    return boot_id() or uuid.uuid4().hex


def find_offset(
    store: Store, rank: int, size: int, name: str, *, now: Callable[[], int] = perf_counter_ns
) -> Offset:
    """Measure the offset of this rank's clock to rank 0's; all ranks call it.

    Rank 0 answers each rank with a different clock, one rank after the other. A rank takes the
    middle of its shortest round trip as the time of the answer.

    Args:
        store: Store that all ranks reach, used only by this call.
        rank: Rank of this process.
        size: Number of ranks.
        name: Name of this rank's clock; equal names denote the same clock.
        now: Clock.
    """
    store.set(f"clock/{rank}", name)
    names = [store.get(f"clock/{other}").decode() for other in range(size)]
    if rank == 0:
        for other in range(1, size):
            if names[other] != name:
                _answer(store, other, now)
        return Offset(0, 0)
    return Offset(0, 0) if names[0] == name else _ask(store, rank, now)


def _answer(store: Store, other: int, now: Callable[[], int]) -> None:
    for trip in range(_TRIPS):
        store.get(f"ask/{other}/{trip}")
        store.set(f"answer/{other}/{trip}", _TIME.pack(now()).hex())


def _ask(store: Store, rank: int, now: Callable[[], int]) -> Offset:
    found: list[Offset] = []
    for trip in range(_TRIPS):
        sent = now()
        store.set(f"ask/{rank}/{trip}", "")
        (theirs,) = _TIME.unpack(bytes.fromhex(store.get(f"answer/{rank}/{trip}").decode()))
        back = now()
        found.append(Offset(theirs - (sent + back) // 2, (back - sent + 1) // 2))
    return min(found, key=lambda offset: offset.error_ns)
