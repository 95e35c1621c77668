"""Why a rank is missing: it failed, died, was stopped, waits elsewhere, or does something else."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Call, Dumps, Event, RankDump
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks, name_call
from gradwire.recorder.verdict.source import swallowing_handler
from gradwire.recorder.verdict.wording import (
    at_line,
    consequences,
    counts_of,
    innermost,
    last_call,
    places_of,
    shortened,
    states_of,
)

__all__ = ["find_deadlock", "find_died", "find_error", "find_missing"]

_SECONDARY = {  # what other ranks' failures look like
    "BrokenGroupError",
    "CheckedMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
    "MismatchError",  # the ranks' calls show more
    "PeerFailedError",
    "PeerLostError",
}
_MEMORY = ("MemoryError", "OutOfMemoryError")


def find_error(dumps: Dumps) -> tuple[Finding, int] | None:
    """The oldest error that no other rank's failure explains, and when it was."""
    errors = [
        (event.time, rank, event)
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if _is_primary(event, dump)
    ]
    if not errors:
        return None
    when, rank, event = min(errors, key=lambda each: each[0])
    same = sorted({r for _, r, e in errors if (e.type, e.message) == (event.type, event.message)})
    culprits = [rank] if event.kind == "uncaught" and len(same) < len(dumps.world) else same
    return _failed(dumps, culprits, event), when


def _failed(dumps: Dumps, culprits: Sequence[int], event: Event) -> Finding:
    named = f" It names the parameters {', '.join(event.parameters)}." if event.parameters else ""
    at = at_line(event.lines)
    ends = "and the process ended" if event.kind == "uncaught" else "as gradwire found"
    message = " ".join(event.message.split())
    return Finding(
        Kind.ERROR,
        tuple(culprits),
        f"{list_ranks(culprits)} failed{at} with {event.type}, {ends}: {shortened(message, 300)}",
        tuple(consequences(dumps, culprits)),
        _error_remedy(event) + named,
        places=tuple(places_of(event.lines)[:1]),
        parameters=event.parameters,
    )


def find_died(dumps: Dumps) -> Finding | None:
    """A rank whose process crashed, was killed or is stopped."""
    for rank, (why, frames) in sorted(dumps.crashes.items()):
        return _crashed(dumps, rank, why, frames)
    killed = {
        rank: exit_
        for rank, exit_ in dumps.exits.items()
        if exit_.code < 0 and exit_.code != -signal.SIGTERM and rank not in _with_errors(dumps)
    }
    if killed:
        rank = min(killed, key=lambda r: killed[r].time)
        return _killed(dumps, rank)
    states = states_of(dumps)
    for rank, state in sorted(states.items()):
        if state.startswith("stopped"):
            return _stopped(dumps, rank, state)
    dead = [rank for rank, state in states.items() if state in ("gone", "dead")]
    gone = [rank for rank in dead if not _ended_by_itself(dumps, rank)]
    return _killed(dumps, min(gone)) if gone else None


def find_deadlock(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Ranks that wait for each other in different groups."""
    waits: dict[int, tuple[Call, tuple[int, ...]]] = {}
    for gap in gaps:
        for rank, call in gap.calls.items():
            if not call.done and rank not in waits:
                waits[rank] = call, gap.missing
    for rank in sorted(waits):
        path = _cycle(waits, rank)
        if path and len({waits[r][0].group for r in path}) > 1:
            calls = [waits[r][0] for r in path]
            details = tuple(
                f"rank {r} waits in the {name_call(waits[r][0])} of group {waits[r][0].group} "
                f"for {list_ranks(waits[r][1])}"
                for r in path
            )
            return Finding(
                Kind.DEADLOCK,
                tuple(sorted(path)),
                f"{list_ranks(path)} wait for each other, each in another group: their collectives "
                "on these groups come in different orders",
                details,
                "use the groups in one order on all ranks that share them, or wait for async work "
                "on one group before starting on the other",
                calls[0].op,
                calls[0].group,
                calls[0].number,
                tuple(dict.fromkeys(f"{c.filename}:{c.line}" for c in calls)),
            )
    return None


def find_missing(dumps: Dumps, gap: Gap) -> Finding:
    """Ranks that have not called a collective in which others wait."""
    call = next(iter(gap.calls.values()))
    who, waiting = list_ranks(gap.missing), list_ranks(list(gap.calls))
    silent = [r for r in gap.missing if r not in dumps.ranks]
    if silent:
        return Finding(
            Kind.MISSING,
            tuple(silent),
            f"{list_ranks(silent)} did not call the {name_call(call)} of group {gap.group}, in "
            f"which {waiting} wait, and left no dump",
            tuple(f"its process is {s}" for r, s in states_of(dumps).items() if r in silent),
            "it died, hangs in C code that holds the GIL, or its host cannot be reached: look for "
            "its process (py-spy dump --pid) and its log",
            **_of(call),
        )
    first = dumps.ranks[gap.missing[0]]
    if first.events:
        return _failed(dumps, list(gap.missing), first.events[0])
    ended = first.reason == "exit"
    kind = Kind.FINISHED if ended else Kind.MISSING
    where = innermost(first.stack)
    at = "had ended" if ended else f"was {where}" if where else "was elsewhere"
    details = [f"rank {r}: {last_call(dumps, r, gap.group)}" for r in gap.missing]
    details += counts_of(dumps, gap)
    handler = swallowing_handler(call.filename, call.line) if ended else None
    remedy = (
        "see why its loop ended before the others': a shorter dataset, an early `break`; "
        "or use model.join() for uneven inputs"
        if ended
        else "see what that line waits for or computes: a loop that does not end, a lock, a data "
        "loader, a file system; `py-spy dump --pid` shows it live"
    )
    if handler is not None:
        details.append(f"line {call.line} is in a `try` whose `except` in line {handler} goes on")
    return Finding(
        kind,
        gap.missing,
        f"{who} did not call the {name_call(call)} of group {gap.group}, in which {waiting} wait; "
        f"it {at}",
        tuple(details),
        remedy,
        **_of(call) | {"places": (*places_of(first.stack)[:1], f"{call.filename}:{call.line}")},
    )


def _of(call: Call) -> dict[str, Any]:
    return {
        "op": call.op,
        "group": call.group,
        "number": call.number,
        "places": (f"{call.filename}:{call.line}",),
        "parameters": call.parameters,
    }


def _is_primary(event: Event, dump: RankDump) -> bool:
    """Whether no other rank's failure explains an error."""
    if event.type in _SECONDARY:
        return False
    if event.type != "RuntimeError":
        return True
    # Gloo's own errors are plain RuntimeErrors, raised where the collective was called
    waits_at = {call.place for call in dump.pending}
    at = {(str(line["filename"]), int(line["line"])) for line in event.lines}
    return not at & waits_at


def _with_errors(dumps: Dumps) -> set[int]:
    return {
        rank
        for rank, dump in dumps.ranks.items()
        if any(_is_primary(event, dump) for event in dump.events)
    }


def _ended_by_itself(dumps: Dumps, rank: int) -> bool:
    """Whether the process wrote its last dump as Python ended, or raised an error."""
    dump = dumps.ranks.get(rank)
    return dump is not None and (dump.reason == "exit" or bool(dump.events))


def _crashed(dumps: Dumps, rank: int, why: str, frames: list[dict[str, Any]]) -> Finding:
    at = innermost(frames)
    return Finding(
        Kind.CRASHED,
        (rank,),
        f"rank {rank}'s process crashed in C ({why}) while it was {at or 'in no Python code'}",
        tuple(consequences(dumps, [rank])),
        "an abort in Gloo means that a peer sent another size than expected: see whether ranks "
        "call the same collective, or run with GRADWIRE_CHECKS=1 or on shm, which compare first",
        places=tuple(places_of(frames)[:1]),
    )


def _killed(dumps: Dumps, rank: int) -> Finding:
    exit_ = dumps.exits.get(rank)
    how = "was killed or ended without a word"
    if exit_ is not None:
        name = signal.Signals(-exit_.code).name if exit_.code < 0 else f"exit code {exit_.code}"
        how = f"was ended by {name}" if exit_.code < 0 else f"ended with {name}"
    remedy = "see who sends the signal: the kernel's log (dmesg) names processes that it killed"
    if exit_ is not None and exit_.oom_killed:
        how += ", by the kernel for lack of memory"
        remedy = "give the container more memory, or use less: a smaller batch, fewer workers"
    elif exit_ is None or exit_.code == -signal.SIGKILL:
        remedy += "; SIGKILL without a sender is nearly always the out-of-memory killer"
    return Finding(
        Kind.DIED,
        (rank,),
        f"rank {rank} {how}",
        (f"rank {rank}: {last_call(dumps, rank, None)}", *consequences(dumps, [rank])),
        remedy,
    )


def _stopped(dumps: Dumps, rank: int, state: str) -> Finding:
    return Finding(
        Kind.STOPPED,
        (rank,),
        f"rank {rank}'s process was {state}: it neither ran nor died, and the others waited",
        tuple(consequences(dumps, [rank])),
        "continue it (kill -CONT), and see who stopped it: SIGSTOP, a debugger, a terminal's "
        "Ctrl-Z, a frozen container",
    )


def _cycle(waits: dict[int, tuple[Call, tuple[int, ...]]], start: int) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first; empty if none do."""
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        following = [r for r in waits.get(rank, (None, ()))[1] if r in waits]
        if not following:
            return []
        rank = following[0]
    return path[path.index(rank) :]


def _error_remedy(event: Event) -> str:
    if event.type in _MEMORY or "allocate memory" in event.message:
        return "use less memory on this rank: a smaller batch, fewer workers, no kept graphs."
    if event.parameters:
        return "see the message: it has the remedy."
    return "see that line: the other ranks' errors come from it."
