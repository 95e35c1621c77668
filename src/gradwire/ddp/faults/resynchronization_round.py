"""One round of resynchronization on one rank, which advances without waiting."""

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
from gradwire.ddp.faults.participants import Participants
from gradwire.ddp.faults.protocol import (
    Phase,
    Statement,
    diverged,
    missing,
    missing_elsewhere,
    next_phase,
)
from gradwire.ddp.faults.waiting import first_failure, work_in_flight
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)

RESYNC_TIMEOUT_SECONDS = 300.0
"""Maximum time to wait for other ranks, which notice an error when they next poll."""
LIVENESS_SECONDS = 0.5
"""Interval at which a rank checks that silent ranks are still running."""
UNDECIDED_TEXT = (
    "backward was interrupted by an exception after its last message: ranks that reduced gradients "
    "in that step have taken a step that this rank has not; give all ranks the same parameters"
)


class ResynchronizationRound:
    """Round that publishes a statement, joins missed collectives and publishes the outcome.

    From its beginning on, this rank only sends collectives that others wait in.

    Args:
        group: Process group.
        channel: Error channel of the group.
        log: Collective log of the group.
        participants: Reducers of the group on this rank.
        error: Error of this rank; None if it only learnt of another rank's error.
        seconds: Timeout of the group.

    Attributes:
        positions: Stated position of each rank. This and the next are valid after `advance` has
            returned True.
        diverged: Message about ranks that missed, because of an exception, a step that others may
            have taken; empty if there are none.
    """

    def __init__(
        self,
        group: ProcessGroup,
        channel: ErrorChannel,
        log: CollectiveLog,
        participants: Participants,
        error: str | None,
        seconds: float,
    ) -> None:
        self._group, self._channel, self._log = group, channel, log
        elsewhere = {
            name: (max(number for number, _ in sent), sent) for name, sent in log.elsewhere.items()
        }
        undecided = max(participants.undecided(), default=None)
        self._statement = Statement(error, log.position(), list(log.sent), elsewhere, undecided)
        self._in_flight = [*participants.in_flight(), *log.in_flight()]
        self.positions: list[int] = []
        self.diverged = ""
        self._failures: dict[int, str] = {}
        self._broken: BrokenGroupError | None = None
        self._timeout = min(RESYNC_TIMEOUT_SECONDS, seconds)
        self._deadline = time.monotonic() + self._timeout
        self._next_check = 0.0
        self._phase = Phase.STATED
        self._goal = self._statement.position
        self._outcome: str | None = None
        self._reported = error is None
        self._published: set[str] = set()

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if the round is over.

        Raises:
            PeerLostError: A rank died, or the group failed.
            CollectiveTimeoutError: A rank did not answer in time.
        """
        if (broken := self._channel.broken()) is not None:
            raise broken
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

    def error(self) -> DistributedError | None:
        """Return the error for this rank to raise after the round, unless it is its own.

        A BrokenGroupError says why the ranks cannot be brought in step.
        """
        if self._broken is not None or self._statement.error is not None:
            return self._broken
        errors = "; ".join(f"rank {rank}: {text}" for rank, text in self._failures.items())
        text = f"gradients were not reduced, because of an error elsewhere. {errors}"
        return PeerFailedError(text, self._failures)

    def _exchange_statements(self) -> None:
        self._publish("statement", asdict(self._statement))
        self._reported = self._reported or self._channel.report()
        published = self._channel.published("statement")
        if published is None:
            return
        statements = [Statement(**one) for one in published]
        self.positions = [s.position for s in statements]
        if ranks := diverged([s.undecided for s in statements], self.positions):
            self.diverged = f"ranks {ranks}: {UNDECIDED_TEXT}"
        self._failures = {r: s.error for r, s in enumerate(statements) if s.error is not None}
        self._goal = max(self.positions)
        try:
            self._join(statements)
        except BrokenGroupError as broken:
            self._outcome = str(broken)
        # The phase changes last: after an exception of a signal handler the next call repeats this
        # method, and the position in the log shows which collectives were joined.
        self._phase = next_phase(self._phase, stated=True, ended=False, joined=False)

    def _join(self, statements: Sequence[Statement]) -> None:
        own = self._log.position()
        sent = [(s.position, s.sent) for s in statements]
        # Check on all ranks: a rank that waits in a collective that cannot be joined would wait
        # until its deadline.
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
        """Return True if all communication has ended or is known not to end."""
        if self._outcome is not None:
            return True
        if self._log.position() > self._goal:
            self._outcome = "a hook sent further collectives after the error"
        elif all(p.done() for p in self._in_flight):
            self._raise_failure()
        elif time.monotonic() > self._deadline:
            self._outcome = f"collectives were still in progress after {self._timeout:g} s"
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
            causes = "; ".join(f"rank {r}: {text}" for r, text in self._failures.items())
            self._broken = BrokenGroupError(
                f"after an error ({causes}) the group's ranks cannot be brought back in step "
                f"({reason}): make a new process group, or restart"
            )

    def _check_liveness(self) -> None:
        """Raise if missing statements or outcomes can no longer arrive."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + LIVENESS_SECONDS
        if self._phase is not Phase.JOINING:  # while JOINING, a failure is the outcome
            self._raise_failure()
        # A rank that is JOINING waits for all ranks, and no rank ends the round before it does.
        topic = "statement" if self._phase is Phase.STATED else "joined"
        silent = self._channel.missing_ranks(topic)
        dead = self._channel.dead(silent)
        # Ask again: a rank may have published its answer and ended between the two requests.
        if dead and (dead := [r for r in self._channel.missing_ranks(topic) if r in dead]):
            raise PeerLostError(f"ranks {dead} ended while resynchronizing after an error")
        if self._phase is Phase.JOINING:  # has a deadline of its own
            return
        # The others may be JOINING until their own deadline and publish their outcome only then.
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
