"""Ranks whose processes ended, are stopped, or were never started as a rank."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence

from gradwire._processes import ENDED, SIGNAL_NAMES
from gradwire.recorder.verdict.dumps import Crash
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    NEVER,
    Evidence,
    Finding,
    Kind,
    at_line,
    list_ranks,
    name_call,
    place_of,
    waits_for_others,
)

_SLACK_NS = 100_000_000
_LOOK = "look for `Killed process` in the kernel's log (dmesg), and at the host's free memory"
_BY_SIGNAL: dict[int, tuple[str, ...]] = {
    signal.SIGKILL: (_LOOK, "find out whether a scheduler or a person sent SIGKILL"),
    signal.SIGSEGV: (
        "look at the extension or library that this line calls, and at the arguments it gets",
        "run this rank alone under gdb, or with PYTHONFAULTHANDLER=1, to see the stack in C",
    ),
    signal.SIGBUS: ("check that /dev/shm and mapped files have space: `df /dev/shm`",),
    signal.SIGABRT: ("see the end of its log: a library called abort() and says why",),
    signal.SIGTERM: ("find out what sent SIGTERM: a time limit, a preemption, or `kill`",),
    signal.SIGINT: ("find out what sent SIGINT: Ctrl-C in its terminal, or `kill -INT`",),
}
_LOCAL = ("localhost", "127.", "::1")
_MUST_AGREE = ("MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE")
_LOST_STORE = {"DistNetworkError", "DistStoreError"}


# -- ends ----------------------------------------------------------------------------------------


def find_crash(evidence: Evidence) -> Finding | None:
    """Find the process that crashed first in C, by itself."""
    return _first_crash(evidence, by_message=False)


def find_aborted(evidence: Evidence) -> Finding | None:
    """Find a process that a backend aborted, because of another rank's message."""
    return _first_crash(evidence, by_message=True)


def _first_crash(evidence: Evidence, *, by_message: bool) -> Finding | None:
    crashes = evidence.dumps.crashes.items()
    of_kind = [(c.time, r, c) for r, c in crashes if _is_by_message(c) == by_message]
    if not of_kind:
        return None
    when, rank, crash = min(of_kind, key=lambda each: each[:2])
    thread = "" if crash.in_main else ", in a thread other than the main one"
    number = {"Bus error": signal.SIGBUS, "Aborted": signal.SIGABRT}.get(crash.why, signal.SIGSEGV)
    summary = f"rank {rank}'s process crashed in C ({crash.why}{thread}) while it was"
    summary += at_line(crash.frames) or " in no Python code"
    places = place_of(crash.frames)
    if not by_message:
        remedies = _BY_SIGNAL[number]
        return Finding(Kind.CRASHED, (rank,), summary, remedies, places=places, time=when)
    summary += "; another rank may have sent an unexpected message"
    remedies = (
        "check that all ranks call the same collective with the same sizes: Gloo aborts a process "
        "that receives an unexpected size",
        "run with GRADWIRE_CHECKS=1 or on shm, which compare the calls first",
    )
    # it ranks after its cause, whenever that was recorded
    return Finding(Kind.CRASHED, (), summary, remedies, places=places, time=NEVER)


def _is_by_message(crash: Crash) -> bool:
    """Return True if a backend aborted the process, because of another rank's message."""
    autograd = any("/torch/autograd/" in str(frame["filename"]) for frame in crash.frames[:1])
    waits = autograd or waits_for_others(crash.frames) or not crash.in_python
    return crash.why.startswith("Aborted") and waits


def find_stopped(evidence: Evidence) -> Finding | None:
    """Find a stopped process."""
    for rank, state in sorted(evidence.states.items()):
        if state.startswith("stopped"):
            trace, stack = evidence.trace(rank), evidence.last_stack(rank)
            return Finding(
                Kind.STOPPED,
                (rank,),
                f"rank {rank}'s process was {state}{at_line(stack)}, neither running nor dead, "
                "and the others waited",
                (
                    "continue it: kill -CONT",
                    "find out what stopped it: SIGSTOP, a debugger, Ctrl-Z in a terminal, a "
                    "frozen container",
                ),
                places=place_of(stack),
                time=trace.beat if trace is not None else 0,
            )
    return None


def find_killed(evidence: Evidence) -> Finding | None:
    """Find ranks that a signal ended, and that nothing else had failed before."""
    dumps = evidence.dumps
    killed = {}
    for rank, exit_ in sorted(dumps.exits.items()):
        failed = rank in dumps.crashes or (rank in dumps.ranks and dumps.ranks[rank].events)
        # launchers end ranks by SIGTERM first
        slack = _SLACK_NS if exit_.code == -signal.SIGTERM else LONG_NS
        if exit_.code < 0 and not failed and not _came_after(evidence, rank, slack):
            killed[rank] = exit_.code
    if -signal.SIGKILL in killed.values():
        killed = {rank: code for rank, code in killed.items() if code == -signal.SIGKILL}
    if not killed or (len(killed) == len(dumps.world) > 1):
        return None
    return _ended(evidence, list(killed))


def find_exit(evidence: Evidence) -> Finding | None:
    """Find a rank that ended itself with a code or a text, or by `os._exit`, before the others."""
    dumps, found = evidence.dumps, []
    for rank in dumps.world:
        dump, exit_ = dumps.ranks.get(rank), dumps.exits.get(rank)
        if rank in dumps.crashes or (dump and dump.events):
            continue
        call = dump.exit if dump is not None and dump.reason == "exit" else None
        code = exit_.code if exit_ is not None else call.code if call is not None else 0
        by_itself = code > 0 or (code == 0 and call is not None and call.how == "os._exit")
        if by_itself and not _came_after(evidence, rank):
            found.append((evidence.ends_at(rank), rank, code))
    if not found:
        return None
    when, rank, code = min(found)
    if len(found) == len(dumps.world) > 1:
        summary = f"all ranks ended themselves, the first with exit code {code}, and none had an "
        summary += "error"
        remedies = ("see the end of their logs",)
        return Finding(Kind.DIED, (), summary, remedies, time=when)
    return _ended(evidence, [rank])


def find_gone(evidence: Evidence) -> Finding | None:
    """Find the one rank whose process had ended without a dump when the others failed."""
    dumps, states = evidence.dumps, evidence.states
    over = {rank for rank, state in states.items() if state in ENDED}
    over |= {rank for rank, exit_ in dumps.exits.items() if exit_.code and rank not in states}
    over |= {rank for rank in dumps.exits if rank not in dumps.ranks}
    last = [dump.events[-1] for dump in dumps.ranks.values() if dump.events]
    ends = [event for event in last if event.kind == "uncaught"] or last
    newest = max((dump.taken_ns for dump in dumps.ranks.values()), default=0)
    first_end = min((event.time for event in ends), default=newest + 1)
    gone = [
        rank
        for rank in sorted(over - {*dumps.crashes})
        if not evidence.ended(rank)
        and not (rank in dumps.ranks and dumps.ranks[rank].events)
        and not _came_after(evidence, rank)
        and evidence.last_seen(rank) < first_end
    ]
    for gap in evidence.gaps:  # a living rank, for longer than a death goes unnoticed
        since = min(call.created for call in gap.calls.values())
        for rank in gap.missing:
            if evidence.standings[rank] is None and dumps.ranks[rank].taken_ns - since > LONG_NS:
                return None
    return _ended(evidence, gone) if len(gone) == 1 else None


def _ended(evidence: Evidence, ranks: list[int]) -> Finding:
    """Describe how ranks ended that did so first."""
    dump, exit_ = evidence.dumps.ranks.get(ranks[0]), evidence.dumps.exits.get(ranks[0])
    call = dump.exit if dump is not None and dump.reason == "exit" else None
    code = exit_.code if exit_ is not None else call.code if call is not None else 0
    call = call if code >= 0 else None
    stack = evidence.last_stack(ranks[0]) if call is None else call.lines
    shortly = f"; shortly before, it was{at_line(stack)}" if call is None and at_line(stack) else ""
    was = "was" if len(ranks) == 1 else "were"
    remedies: Sequence[str] = (_LOOK,)
    if call is not None:
        how = f"called {call.how}{at_line(stack)} and ended with exit code {code}"
        how += f", saying: {' '.join(call.text.split())[:300]}" if call.text else ""
        how += ", before the other ranks"
        remedies = ("see why this rank takes this way out, and the others do not",)
    elif exit_ is None:
        how = f"{was} killed or ended without a dump"
    elif code >= 0:
        how = f"ended with exit code {code}{' without a dump' if dump is None else ''}, "
        how += "before the other ranks"
        remedies = ("see the end of its log: SystemExit was raised, or os._exit was called in C",)
    else:
        how = f"{was} ended by {SIGNAL_NAMES.get(-code, f'signal {-code}')}"
        remedies = _BY_SIGNAL.get(-code, ("find out what sent this signal",))
        if exit_.oom_killed:
            how += ", by the kernel's out-of-memory killer"
            remedies = ("raise its memory limit, or use less: a smaller batch, fewer workers",)
    return Finding(
        Kind.DIED,
        ranks,
        f"{evidence.on_host(ranks)} {how}{shortly}",
        remedies,
        [evidence.last_call(rank) for rank in ranks],
        place_of(stack),
        time=min(evidence.ends_at(rank) for rank in ranks),
    )


def _came_after(evidence: Evidence, rank: int, slack: int = _SLACK_NS) -> bool:
    """Return True if a rank still ran when another one had failed: it was ended for that."""
    failed = min((evidence.fails_at(r) for r in evidence.dumps.ranks if r != rank), default=NEVER)
    if evidence.ended(rank):
        return evidence.ends_at(rank) > failed
    # a dying process closes its connections before its state changes
    return evidence.last_seen(rank) > failed + slack


def find_left(evidence: Evidence) -> Finding | None:
    """Find a rank that ended without an error while a call of its own was still running."""
    found = [
        (evidence.ends_at(rank), rank, dump.pending[0])
        for rank, dump in evidence.dumps.ranks.items()
        if evidence.ended(rank)
        and dump.pending
        and not dump.events
        and not _came_after(evidence, rank)
    ]
    if not found or len(found) == len(evidence.dumps.world):
        return None
    when, rank, call = min(found, key=lambda each: each[:2])
    summary = f"rank {rank} ended while its {name_call(call)} was still running: nothing waited "
    summary += "for its handle"
    remedies = ("call wait() on the handle that this line returns",)
    return Finding(Kind.FINISHED, (rank,), summary, remedies, places=(call.place,), time=when)


# -- start-up ------------------------------------------------------------------------------------


def find_same_rank(evidence: Evidence) -> Finding | None:
    """Find two processes that were started with the same RANK."""
    starts = evidence.dumps.starts
    doubled = [rank for rank, n in Counter(start.rank for start in starts).items() if n > 1]
    if evidence.began or not doubled:
        return None
    rank = doubled[0]
    of = [start for start in starts if start.rank == rank]
    who = " and ".join(f"process {start.pid} on {start.host}" for start in of)
    size = of[0].launch.get("WORLD_SIZE", "")
    expected = range(int(size) if size.isdecimal() else 0)
    lacking = sorted({*expected} - {start.rank for start in starts})
    lacks = f"; no process has RANK {', '.join(map(str, lacking))}" if lacking else ""
    details = []
    for start in of:
        values = " ".join(f"{name}={value}" for name, value in sorted(start.launch.items()))
        details.append(f"process {start.pid} on {start.host}: {values}")
    return Finding(
        Kind.START,
        (rank,),
        f"{len(of)} processes were started with RANK={rank}: {who}{lacks}",
        (
            "give each process a RANK of its own, from 0 to WORLD_SIZE - 1",
            "on several hosts, RANK is node rank * processes per host + LOCAL_RANK",
        ),
        details,
        time=1,
    )


def find_other_values(evidence: Evidence) -> Finding | None:
    """Find ranks that were started with another address, port or number of ranks."""
    starts = evidence.dumps.starts
    for name in _MUST_AGREE if not evidence.began else ():
        by_value: dict[str, list[int]] = {}
        for start in starts:
            by_value.setdefault(start.launch.get(name, "(not set)"), []).append(start.rank)
        if len(by_value) < 2:
            continue
        changed = sorted(
            {s.rank for s in starts if s.was and s.was.get(name) != s.launch.get(name)}
        )
        most, second, *_ = sorted(by_value.values(), key=len, reverse=True)
        few = sorted({start.rank for start in starts} - {*most})
        named = few if len(most) > len(second) else changed if len(changed) < len(starts) else []
        why = f"; the program changed it on {list_ranks(changed)}" if changed else ""
        shown = ", ".join(f"{list_ranks(of)} {name}={value}" for value, of in by_value.items())
        return Finding(
            Kind.START,
            named,
            f"the ranks were started with different values of {name}: {shown}; they look for "
            f"each other in different places{why}",
            (f"set the same {name} for all ranks",),
            time=1,
        )
    return None


def find_never_started(evidence: Evidence) -> Finding | None:
    """Find ranks of which no process was seen, while all others wait for them to join."""
    dumps = evidence.dumps
    sizes = {start.launch.get("WORLD_SIZE", "") for start in dumps.starts}
    if evidence.began or len(sizes) != 1 or any(evidence.primary.values()):
        return None
    text = sizes.pop()
    size = int(text) if text.isdecimal() else 0
    seen = {start.rank for start in dumps.starts} | {*dumps.ranks}
    lacking = sorted({*range(min(size, 1 << 16))} - seen)
    if not lacking:
        return None
    local = all(s.launch.get("MASTER_ADDR", "").startswith(_LOCAL) for s in dumps.starts)
    stack = next((dump.stack for dump in dumps.ranks.values() if dump.stack), [])
    where = "" if local else ", or write to another directory"
    return Finding(
        Kind.START,
        lacking if local else (),
        f"{list_ranks(lacking)} {'was' if len(lacking) == 1 else 'were'} never started{where}: "
        f"WORLD_SIZE is {size}, and {list_ranks(sorted(seen))} were seen",
        (
            f"start a process for each rank from 0 to {size - 1}",
            f"or set WORLD_SIZE to {len(seen)} on all of them",
        ),
        [f"the others wait{at_line(stack)}"],
        place_of(stack),
        time=1,
    )


def find_store_gone(evidence: Evidence) -> Finding | None:
    """Find that rank 0 has ended, whose process held the store that the others use."""
    lost = {
        rank: event
        for rank, dump in evidence.dumps.ranks.items()
        for event in dump.events
        if not _LOST_STORE.isdisjoint((event.type, *event.chain))
    }
    event = min(lost.values(), key=lambda each: each.time, default=None)
    if event is None or 0 in lost or evidence.gaps or evidence.ends_at(0) > event.time:
        return None
    return Finding(
        Kind.FINISHED,
        (0,),
        f"rank 0 had ended, and with it the store that {list_ranks(sorted(lost))} still needed"
        f"{at_line(event.lines)}",
        (
            "let rank 0 end last: call dist.barrier() at the end of the program on all ranks",
            "or run the store in the launcher, as torchrun and `gradwire run` do",
        ),
        places=place_of(event.lines),
        time=evidence.ends_at(0),
    )
