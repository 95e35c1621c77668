"""How ranks tell each other of errors while their collectives hang: through the group's store.

A rank that fails rings; a rank that waits listens from time to time. Then all meet, exchange what
went wrong and what they had sent, and bring each other level (see `_ledger`). Keys are numbered by
how often this happened, which all ranks count alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from gradwire.ddp._ledger import Ledger, catch_up, missing
from gradwire.ddp._wait import translate
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    NotSupportedError,
    PeerLostError,
)

__all__ = ["Alarm", "Pending", "pending_future", "pending_work"]

MEET = "meet"
MEET_SECONDS = 300.0
"""How long a rank that failed waits for the others to finish what they compute and hear of it."""


@dataclass(frozen=True)
class Pending:
    """Communication that a rank has under way: whether it has ended, and with what error."""

    done: Callable[[], bool]
    error: Callable[[], BaseException | None]


def pending_work(work: Work) -> Pending:
    """A work handle as something pending."""

    def error() -> BaseException | None:
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError as raised:
            return raised
        return None

    return Pending(work.is_completed, error)


def pending_future(future: torch._C.Future[Any]) -> Pending:
    """A hook's future as something pending; what the hook's own code raised does not count."""

    def error() -> BaseException | None:
        try:
            future.value()
        except RuntimeError as raised:
            return raised if isinstance(translate(raised, ""), PeerLostError) else None
        except Exception:
            return None
        return None

    return Pending(future.done, error)


def _raise_lost(ended: Sequence[Pending]) -> None:
    for p in ended:
        if failure := p.error():
            raise PeerLostError(f"a rank was lost while meeting after an error: {failure}")


class Alarm:
    """The bell of one reducer, on all ranks of its group.

    Args:
        group: The group. Ranks construct their reducers on it in the same order.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._size = group.size()
        store = _store_of(group)
        number = store.add(f"gradwire/reducers/{self._rank}", 1)
        self._store = PrefixStore(f"gradwire/reducer{number}", store)
        self._met = 0
        self._votes = 0

    def rung(self) -> bool:
        """Whether any rank has asked for a meeting since the last one.

        Raises:
            PeerLostError: A rank has told that the group itself failed.
        """
        key = self._key("alarm")
        if not self._call(lambda: self._store.check([key])):
            return False
        asked = self._call(lambda: self._store.get(key)).decode()
        if asked != MEET:
            raise PeerLostError(asked)
        return True

    def tell_lost(self, error: str) -> None:
        """Tell the others that the group itself failed, so that nobody waits for this rank."""
        with suppress(dist.DistError):  # the store may be what was lost
            self._store.set(self._key("alarm"), f"rank {self._rank} saw the group fail: {error}")

    def vote(self, look: Callable[[], None]) -> None:
        """Return when every rank has called this as often as this one; `look` raises otherwise."""
        self._votes += 1
        target, counter = self._votes * self._size, self._key("votes")
        votes = self._call(lambda: self._store.add(counter, 1))
        pause = 0.0
        while votes < target:
            time.sleep(pause)
            pause = min(2 * pause + 2e-5, 5e-3)
            votes = self._call(lambda: self._store.add(counter, 0))
            if votes < target:
                look()

    def meet(
        self, error: str | None, step: int, ledger: Ledger, pending: Sequence[Pending]
    ) -> tuple[dict[int, str], bool]:
        """Ring, meet all ranks, bring everyone level.

        Args:
            error: What went wrong on this rank, or None if it came because another rang.
            step: The number of this rank's backward.
            ledger: What this rank sent in this backward.
            pending: What of it has not ended.

        Returns:
            By rank, what went wrong there; and whether it went wrong in later steps only: then
            all ranks have taken part in this one.

        Raises:
            BrokenGroupError: The ranks cannot be brought level; the group is of no more use.
            PeerLostError: A rank died.
            CollectiveTimeoutError: A rank did not come.
        """
        self._call(lambda: self._store.compare_set(self._key("alarm"), "", MEET))
        position = ledger.position()
        told = self._exchange("told", [error, position, ledger.entries, step], pending)
        verdict = None
        try:
            positions = [(entry[1], entry[2]) for entry in told]
            level = catch_up(self._group, missing(position, positions))
            goal = max(number for number, _ in positions)
            self._drain([*pending, *map(pending_work, level)], ledger, goal)
        except BrokenGroupError as broken:
            verdict = str(broken)
        verdicts = self._exchange("level", verdict, [])
        self._met += 1
        self._votes = 0
        if any(verdicts):
            reason = "; ".join(f"rank {r}: {v}" for r, v in enumerate(verdicts) if v)
            causes = "; ".join(f"rank {r}: {t[0]}" for r, t in enumerate(told) if t[0])
            raise BrokenGroupError(
                f"after an error ({causes}) the group's ranks cannot be brought back in step "
                f"({reason}): make a new process group, or restart"
            )
        failures = {rank: entry[0] for rank, entry in enumerate(told) if entry[0]}
        return failures, all(entry[3] > step for entry in told if entry[0])

    def _drain(self, pending: Sequence[Pending], ledger: Ledger, goal: int) -> None:
        """Waits until all that is pending has ended, and nothing has been sent besides."""
        deadline = time.monotonic() + MEET_SECONDS
        while not all(p.done() for p in pending):
            if ledger.position() > goal or time.monotonic() > deadline:
                raise BrokenGroupError("a hook went on to further collectives after the error")
            time.sleep(1e-3)
        _raise_lost(pending)

    def _exchange(self, topic: str, value: Any, pending: Sequence[Pending]) -> list[Any]:
        """Every rank's value, in rank order: an all_gather through the store."""
        keys = [self._key(f"{topic}/{rank}") for rank in range(self._size)]
        self._call(lambda: self._store.set(keys[self._rank], json.dumps(value)))
        deadline = time.monotonic() + MEET_SECONDS
        while not self._call(lambda: self._store.check(keys)):
            _raise_lost([p for p in pending if p.done()])
            self.rung()
            if time.monotonic() > deadline:
                absent = [r for r, k in enumerate(keys) if not self._store.check([k])]
                raise CollectiveTimeoutError(
                    f"ranks {absent} did not answer within {MEET_SECONDS:g} s after an error"
                )
            time.sleep(2e-3)
        return [json.loads(value) for value in self._call(lambda: self._store.multi_get(keys))]

    def _key(self, name: str) -> str:
        return f"{self._met}/{name}"

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except dist.DistError as error:
            raise PeerLostError(
                f"the group's store does not answer (the rank that hosts it is gone): {error}"
            ) from error


def _store_of(group: ProcessGroup) -> Store:
    try:
        store: Store | None = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:  # made by hand, unknown to torch.distributed
        store = None
    if store is None:
        raise NotSupportedError(
            "the group has no store, through which ranks tell each other of errors: use a group "
            "that torch.distributed made with one (init_process_group or new_group; not MPI)"
        )
    return store
