"""One resynchronization, on one rank: it advances without ever waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import ProcessGroup

from gradwire.ddp.faults.collective_log import (
    CollectiveLog,
    check_joinable,
    group_of,
    join,
    sequence_number,
)
from gradwire.ddp.faults.error_channel import ErrorChannel
from gradwire.ddp.faults.protocol import (
    Phase,
    Statement,
    diverged,
    missing,
    missing_elsewhere,
    next_phase,
)
from gradwire.ddp.faults.waiting import InFlight, first_failure, work_in_flight
from gradwire.errors import BrokenGroupError, CollectiveTimeoutError, PeerLostError

__all__ = ["RESYNC_TIMEOUT_SECONDS", "ResynchronizationRound"]

RESYNC_TIMEOUT_SECONDS = 300.0
"""How long, at most, a rank waits for others, which learn of an error when they next poll."""
LIVENESS_SECONDS = 0.5
"""Interval of looking up whether ranks that have not answered still run."""


class ResynchronizationRound:
    """Publishes this rank's statement, joins what it missed, and publishes how that went.

    Args:
        group: The group.
        channel: Its error channel.
        log: Its log.
        statement: This rank's.
        in_flight: What this rank has under way.
        seconds: The group's timeout.

    Attributes:
        own: This rank's error, or None.
        failures: By rank, what went wrong there.
        positions: Each rank's position as it was stated.
        diverged: Ranks that an exception kept from a step that others may have taken.
        broken: Why the ranks cannot be brought in step, or None. These four are valid once
            `advance` has returned True.
    """

    def __init__(
        self,
        group: ProcessGroup,
        channel: ErrorChannel,
        log: CollectiveLog,
        statement: Statement,
        in_flight: Sequence[InFlight],
        seconds: float,
    ) -> None:
        self._group, self._channel, self._log = group, channel, log
        self._statement, self._in_flight = statement, list(in_flight)
        self.own = statement.error
        self.failures: dict[int, str] = {}
        self.positions: list[int] = []
        self.diverged: list[int] = []
        self.broken: BrokenGroupError | None = None
        self._timeout = min(RESYNC_TIMEOUT_SECONDS, seconds)
        self._deadline = time.monotonic() + self._timeout
        self._next_check = 0.0
        self._phase = Phase.STATED
        self._goal = statement.position
        self._outcome: str | None = None
        self._reported = statement.error is None
        self._published: set[str] = set()

    def advance(self) -> bool:
        """Go on as far as is possible without waiting; whether the round is over.

        Raises:
            PeerLostError: A rank died, or the group failed.
            CollectiveTimeoutError: A rank did not answer in time.
        """
        if (lost := self._channel.lost()) is not None:
            raise lost
        while True:
            before = self._phase
            if before is Phase.STATED:
                self._exchange_statements()
            elif before is Phase.JOINING:
                ended = self._ended()
                self._phase = next_phase(before, stated=True, ended=ended, joined=False)
            elif before is Phase.JOINED:
                self._compare_outcomes()
            if self._phase is Phase.DONE:
                return True
            if self._phase is before:
                self._check_liveness()
                return False

    def _exchange_statements(self) -> None:
        self._publish("statement", asdict(self._statement))
        self._reported = self._reported or self._channel.report()
        published = self._channel.published("statement")
        if published is None:
            return
        statements = [Statement(**one) for one in published]
        self.positions = [s.position for s in statements]
        self.diverged = diverged([s.undecided for s in statements], self.positions)
        self.failures = {r: s.error for r, s in enumerate(statements) if s.error is not None}
        self._goal = max(self.positions)
        try:
            self._join(statements)
        except BrokenGroupError as broken:
            self._outcome = str(broken)
        # Last: where a signal handler's exception comes before it, the next call does this again,
        # and the position in the log says what has been joined already.
        self._phase = next_phase(self._phase, stated=True, ended=False, joined=False)

    def _join(self, statements: Sequence[Statement]) -> None:
        own = self._log.position(self._group)
        sent = [(s.position, s.sent) for s in statements]
        # those who wait in what the ranks behind cannot join would wait until their deadline
        for entry in missing(min(self.positions), sent):
            check_joinable(entry)
        for entry in missing(own, sent):
            self._in_flight.append(work_in_flight(join(self._group, entry)))
        for name in sorted({name for s in statements for name in s.elsewhere}):
            group = group_of(name)
            if group is not None:
                at = sequence_number(group)
                for entry in missing_elsewhere(name, at, statements):
                    self._in_flight.append(work_in_flight(join(group, entry)))

    def _ended(self) -> bool:
        """Whether all that is under way has ended, or it is known that it cannot."""
        if self._outcome is not None:
            return True
        if self._log.position(self._group) > self._goal:
            self._outcome = "a hook went on to further collectives after the error"
        elif all(p.done() for p in self._in_flight):
            self._raise_failure()
        elif time.monotonic() > self._deadline:
            self._outcome = f"collectives were still under way after {self._timeout:g} s"
        else:
            return False
        return True

    def _compare_outcomes(self) -> None:
        self._publish("joined", self._outcome)
        outcomes = self._channel.published("joined")
        joined = outcomes is not None
        self._phase = next_phase(self._phase, stated=True, ended=True, joined=joined)
        if outcomes is not None and any(outcomes):
            reason = "; ".join(f"rank {r}: {v}" for r, v in enumerate(outcomes) if v)
            causes = "; ".join(f"rank {r}: {text}" for r, text in self.failures.items())
            self.broken = BrokenGroupError(
                f"after an error ({causes}) the group's ranks cannot be brought back in step "
                f"({reason}): make a new process group, or restart"
            )

    def _check_liveness(self) -> None:
        """Raise if the statements or outcomes that are missing cannot come any more."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + LIVENESS_SECONDS
        if self._phase is not Phase.JOINING:  # there, what has failed is the outcome
            self._raise_failure()
        # who joins waits for all ranks, and none ends the round before it
        topic = "statement" if self._phase is Phase.STATED else "joined"
        silent = self._channel.missing_ranks(topic)
        dead = self._channel.dead(silent)
        # Asked again: a rank may have published its answer and ended between the two requests.
        if dead and (dead := [r for r in self._channel.missing_ranks(topic) if r in dead]):
            raise PeerLostError(f"ranks {dead} ended while resynchronizing after an error")
        if self._phase is Phase.JOINING:  # has a deadline of its own
            return
        # the others may be joining until their own deadline, and say only then how it went
        if now > self._deadline + self._timeout * (self._phase is Phase.JOINED):
            raise CollectiveTimeoutError(
                f"ranks {silent} did not answer within {self._timeout:g} s after an error"
            )

    def _raise_failure(self) -> None:
        if failure := first_failure(self._in_flight):
            raise PeerLostError(f"a rank was lost while resynchronizing: {failure}") from failure

    def _publish(self, topic: str, value: Any) -> None:
        if topic not in self._published and self._channel.publish(topic, value):
            self._published.add(topic)
