"""Signs of life, newcomers, and the end of this member's generation.

One thread per member writes its sign of life and reads those of the others. When a member of the
generation is dead or silent or has left it, or the next generation was decided without this member,
the thread aborts the group, so that the main thread does not wait longer. A connection that was
lost on one end only does not tell the other end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradwire._processes import is_alive
from gradwire.elastic.members.membership import Membership, Signs
from gradwire.errors import DistributedError


@dataclass(frozen=True)
class Absent:
    """Members that take no part.

    Args:
        gone: All of them.
        dead: Members that will not come back.
        left: Members that reported that they left.
    """

    gone: frozenset[int]
    dead: frozenset[int]
    left: frozenset[int]


class Monitor:
    """Signs of life of this member and of others.

    Args:
        membership: Keys of the run in the store.
        period: Seconds between two signs of life.
        silence: Seconds without a sign of life after which a member counts as lost.

    Attributes:
        wanted: True if a member has arrived at the next rendezvous.
        reason: Reason why the generation has to end; "" if it does not.
    """

    def __init__(self, membership: Membership, period: float, silence: float) -> None:
        self._membership, self._period, self._silence = membership, period, silence
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._abort: Callable[[], None] | None = None
        self._moved_on: set[int] = set()  # members that had arrived at the next rendezvous
        self._end = threading.Event()
        self._looked = time.monotonic()
        self.wanted, self.reason = False, ""
        self._thread = threading.Thread(target=self._run, name="gradwire-elastic", daemon=True)
        self._thread.start()

    def watch(self, generation: int, members: Iterable[int], abort: Callable[[], None]) -> None:
        """Call `abort` once if a member of the generation is lost or the generation has ended."""
        with contextlib.suppress(DistributedError):  # the store may die at any time
            self._membership.is_open(generation + 1)  # creates the key that `_look` reads
        with self._lock:
            self.wanted, self.reason = False, ""
            self._generation, self._members, self._abort = generation, tuple(members), abort
            self._seen = {n: seen for n, seen in self._seen.items() if n in self._members}
            self._moved_on = set()

    def ignore(self) -> None:
        """Stop watching a generation."""
        with self._lock:
            self._generation, self._members, self._abort = 0, (), None

    def absent(self, numbers: Iterable[int]) -> Absent:
        """Return the members among `numbers` that are dead, silent or done."""
        others = [n for n in numbers if n != self._membership.number]
        return self._judge(self._membership.signs(others))

    def _judge(self, signs: Signs) -> Absent:
        dead = {n for n in signs.beats if self._is_dead(n)} | signs.left
        with self._lock:
            silent = self._silent({n: b for n, b in signs.beats.items() if n not in dead})
        return Absent(frozenset(dead | silent), frozenset(dead), signs.left)

    def close(self) -> None:
        """End the thread."""
        self.ignore()
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * self._period + 1.0)

    def _is_dead(self, number: int) -> bool:
        process = self._membership.process(number)
        return process is not None and not is_alive(process.process)

    def _silent(self, beats: Mapping[int, bytes]) -> set[int]:
        now = time.monotonic()
        if now - self._looked > self._silence / 2:  # this process itself was suspended
            self._seen = {n: (beat, now) for n, (beat, _) in self._seen.items()}
        self._looked = now
        for number, beat in beats.items():
            if number not in self._seen or self._seen[number][0] != beat:
                self._seen[number] = (beat, now)
        return {n for n in beats if now - self._seen[n][1] > self._silence}

    def _run(self) -> None:
        count = 0
        while not self._end.wait(self._period):
            count += 1
            try:
                self._membership.beat(count)
                self._look()
            except DistributedError:
                continue  # without the store nobody can join, but the generation continues

    def _look(self) -> None:
        with self._lock:
            generation, members = self._generation, self._members
        if not generation:
            return
        others = [n for n in members if n != self._membership.number]
        signs = self._membership.signs(others, generation + 1)
        with self._lock:
            self.wanted = self.wanted or (signs.wanted and self._generation == generation)
        if reason := self._reason_to_end(generation, others, signs):
            with self._lock:
                if self._generation != generation or self._abort is None:
                    return
                abort, self._abort, self.reason = self._abort, None, reason
            abort()

    def _reason_to_end(self, generation: int, others: Sequence[int], signs: Signs) -> str:
        """Return why the generation has to end; "" if it does not."""
        if signs.wanted:
            if self._membership.decision(generation + 1) is not None:
                return (
                    f"generation {generation + 1} was decided while this member was in {generation}"
                )
            before = self._moved_on
            arrived = {r.member for r in self._membership.arrivals(generation + 1)}
            self._moved_on = arrived.intersection(others)
            # a member that passed a barrier earlier than this one may be there for a moment
            if moved_on := before & self._moved_on:
                return f"members {sorted(moved_on)} have left the generation"
        absent = self._judge(signs)
        if lost := absent.gone - absent.left:
            return f"members {sorted(lost)} died or gave no sign of life"
        return ""
