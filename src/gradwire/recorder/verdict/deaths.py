"""Ranks whose processes crashed, were killed, ended without a word, or are stopped."""

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
"""The others notice a dead rank sooner than that; who was waited for longer was late before."""


_AFTER_ALL = 1 << 63


def find_crash(dumps: Dumps) -> tuple[Finding, int] | None:
    """A rank whose process crashed in C, and when."""
    if not dumps.crashes:
        return None
    own = {r: crash for r, crash in dumps.crashes.items() if not _by_message(crash)}
    rank, crash = min((own or dumps.crashes).items(), key=lambda item: item[1].time)
    # what a backend does for another rank's message has a cause, whenever that was noted
    return _crashed(dumps, rank, crash), crash.time if own else _AFTER_ALL


def find_killed(dumps: Dumps) -> Finding | None:
    """Ranks that somebody else ended or stopped: by a signal."""
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
    """A rank whose process was gone when the others failed, and that wrote nothing."""
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
    """When the first rank failed that left a dump of it."""
    last = [dump.events[-1] for dump in dumps.ranks.values() if dump.events]
    uncaught = [event.time for event in last if event.kind == "uncaught"]
    times = uncaught or [event.time for event in last]
    return min(times, default=max((dump.taken for dump in dumps.ranks.values()), default=0) + 1)


def _late_before(dumps: Dumps, gaps: Sequence[Gap]) -> bool:
    """Whether others had waited for a rank that lives, for longer than it takes to notice death."""
    for gap in gaps:
        since = min(call.created for call in gap.calls.values())
        for rank in gap.missing:
            dump = dumps.ranks[rank]
            if standing_of(dumps, rank) is None and dump.taken - since > _LONG_NS:
                return True
    return False


def _ended_by_itself(dumps: Dumps, rank: int) -> bool:
    """Whether the process wrote its last dump as Python ended, or raised an error."""
    dump = dumps.ranks.get(rank)
    return dump is not None and (dump.reason == "exit" or bool(dump.events))


def _by_message(crash: Crash) -> bool:
    """Whether a backend ended the process, which it does for what another rank sent."""
    autograd = any("/torch/autograd/" in str(frame["filename"]) for frame in crash.frames[:1])
    return crash.why.startswith("Aborted") and (autograd or waits_for_others(crash.frames))


def _crashed(dumps: Dumps, rank: int, crash: Crash) -> Finding:
    at = innermost(crash.frames)
    blamed = (rank,) if not _by_message(crash) else ()
    whose = "" if blamed else "; another rank may have sent what it did not expect"
    return Finding(
        Kind.CRASHED,
        blamed,
        f"rank {rank}'s process crashed in C ({crash.why}) while it was "
        f"{at or 'in no Python code'}{whose}",
        tuple(consequences(dumps, [rank])),
        "an abort in Gloo means that a peer sent another size than expected: see whether ranks "
        "call the same collective, or run with GRADWIRE_CHECKS=1 or on shm, which compare first",
        places=tuple(places_of(crash.frames)[:1]),
    )


def _killed(dumps: Dumps, ranks: Sequence[int]) -> Finding:
    exit_ = dumps.exits.get(ranks[0])
    how = "was killed or ended without a word"
    remedy = "see who sends the signal: the kernel's log (dmesg) names processes that it killed"
    if exit_ is not None and exit_.code >= 0:
        how = f"ended with exit code {exit_.code}, and wrote nothing"
        remedy = "see its log: something called os._exit, or ended it while Python did not run"
    elif exit_ is not None:
        how = f"was ended by {_name_of(-exit_.code)}"
    if exit_ is not None and exit_.oom_killed:
        how += ", by the kernel for lack of memory"
        remedy = "give the container more memory, or use less: a smaller batch, fewer workers"
    elif exit_ is None or exit_.code == -signal.SIGKILL:
        remedy += "; SIGKILL without a sender is nearly always the out-of-memory killer"
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
        f"rank {rank}'s process was {state}: it neither ran nor died, and the others waited",
        tuple(consequences(dumps, [rank])),
        "continue it (kill -CONT), and see who stopped it: SIGSTOP, a debugger, a terminal's "
        "Ctrl-Z, a frozen container",
    )
