"""Rules about processes that crashed, were killed, ended without a dump, or are stopped."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from gradwire.recorder.processes import OVER
from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Crash, Dumps
from gradwire.recorder.verdict.errors import with_errors
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks
from gradwire.recorder.verdict.standing import standing_of, waits_for_others
from gradwire.recorder.verdict.wording import (
    consequences,
    innermost,
    last_call,
    places_of,
    states_of,
)

_LONG_NS = 1_000_000_000
"""Upper bound on noticing a dead rank; a rank that was waited for longer was late before."""


_AFTER_ALL = 1 << 63


def find_crash(dumps: Dumps) -> tuple[Finding, int] | None:
    """Find a rank whose process crashed in C, and the time."""
    if not dumps.crashes:
        return None
    own = {r: crash for r, crash in dumps.crashes.items() if not _by_message(crash)}
    rank, crash = min((own or dumps.crashes).items(), key=lambda item: item[1].time)
    # an abort caused by another rank's message ranks after its cause, whenever that was recorded
    return _crashed(dumps, rank, crash), crash.time if own else _AFTER_ALL


def find_killed(dumps: Dumps) -> Finding | None:
    """Find ranks that a signal ended or stopped."""
    for number in (signal.SIGKILL, None):
        killed = [
            rank
            for rank, exit_ in sorted(dumps.exits.items())
            if exit_.code < 0
            and exit_.code != -signal.SIGTERM
            and number in (None, -exit_.code)
            and rank not in dumps.crashes
            and rank not in with_errors(dumps)
        ]
        if killed:
            return _killed(dumps, killed)
    for rank, state in sorted(states_of(dumps).items()):
        if state.startswith("stopped"):
            return _stopped(dumps, rank, state)
    return None


def find_ended(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Find a rank whose process had ended without a dump when the others failed."""
    states = states_of(dumps)
    failed = _first_failure(dumps)
    over = {rank for rank, state in states.items() if state in OVER}
    over |= {rank for rank, exit_ in dumps.exits.items() if exit_.code and rank not in states}
    gone = [
        rank
        for rank in sorted(over)
        if not _ended_by_itself(dumps, rank)
        and rank not in dumps.crashes
        and max((dump.alive.get(rank, 0) for dump in dumps.ranks.values()), default=0) < failed
    ]
    if len(gone) != 1 or _late_before(dumps, gaps):
        return None
    return _killed(dumps, gone)


def _first_failure(dumps: Dumps) -> int:
    """Return the time of the first failure in the dumps."""
    last = [dump.events[-1] for dump in dumps.ranks.values() if dump.events]
    uncaught = [event.time for event in last if event.kind == "uncaught"]
    times = uncaught or [event.time for event in last]
    return min(times, default=max((dump.taken for dump in dumps.ranks.values()), default=0) + 1)


def _late_before(dumps: Dumps, gaps: Sequence[Gap]) -> bool:
    """Return True if ranks had waited for a living rank for longer than a death goes unnoticed."""
    for gap in gaps:
        since = min(call.created for call in gap.calls.values())
        for rank in gap.missing:
            dump = dumps.ranks[rank]
            if standing_of(dumps, rank) is None and dump.taken - since > _LONG_NS:
                return True
    return False


def _ended_by_itself(dumps: Dumps, rank: int) -> bool:
    """Return True if the process wrote a dump at its end, or recorded an error."""
    dump = dumps.ranks.get(rank)
    return dump is not None and (dump.reason == "exit" or bool(dump.events))


def _by_message(crash: Crash) -> bool:
    """Return True if a backend aborted the process, because of another rank's message."""
    autograd = any("/torch/autograd/" in str(frame["filename"]) for frame in crash.frames[:1])
    return crash.why.startswith("Aborted") and (autograd or waits_for_others(crash.frames))


def _crashed(dumps: Dumps, rank: int, crash: Crash) -> Finding:
    at = innermost(crash.frames)
    blamed = (rank,) if not _by_message(crash) else ()
    whose = "" if blamed else "; another rank may have sent an unexpected message"
    return Finding(
        Kind.CRASHED,
        blamed,
        f"rank {rank}'s process crashed in C ({crash.why}) while it was "
        f"{at or 'in no Python code'}{whose}",
        tuple(consequences(dumps, [rank])),
        "an abort in Gloo means that a peer sent an unexpected size: check that ranks call the "
        "same collective, or run with GRADWIRE_CHECKS=1 or on shm, which compare calls first",
        places=tuple(places_of(crash.frames)[:1]),
    )


def _killed(dumps: Dumps, ranks: Sequence[int]) -> Finding:
    exit_ = dumps.exits.get(ranks[0])
    how = "was killed or ended without a dump"
    remedy = "find out what sent the signal: the kernel's log (dmesg) lists processes it killed"
    if exit_ is not None and exit_.code >= 0:
        how = f"ended with exit code {exit_.code} without a dump"
        remedy = "see its log: os._exit was called, or it ended while Python was not running"
    elif exit_ is not None:
        how = f"was ended by {_name_of(-exit_.code)}"
    if exit_ is not None and exit_.oom_killed:
        how += ", by the kernel's out-of-memory killer"
        remedy = "raise the container's memory limit, or use less: a smaller batch, fewer workers"
    elif exit_ is None or exit_.code == -signal.SIGKILL:
        remedy += "; SIGKILL without a sender is usually the out-of-memory killer"
    return Finding(
        Kind.DIED,
        tuple(ranks),
        f"{list_ranks(ranks)} {how}",
        (
            *(f"rank {rank}: {last_call(dumps, rank, None)}" for rank in ranks),
            *consequences(dumps, ranks),
        ),
        remedy,
    )


def _name_of(number: int) -> str:
    names: Mapping[int, str] = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def _stopped(dumps: Dumps, rank: int, state: str) -> Finding:
    return Finding(
        Kind.STOPPED,
        (rank,),
        f"rank {rank}'s process was {state}, neither running nor dead, and the others waited",
        tuple(consequences(dumps, [rank])),
        "continue it (kill -CONT), and find out what stopped it: SIGSTOP, a debugger, Ctrl-Z in "
        "a terminal, a frozen container",
    )
