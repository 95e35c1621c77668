"""Ranks whose processes ended or are stopped: signals, crashes in C, exits."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradwire._processes import ENDED
from gradwire.recorder.verdict.dumps import Crash, Dumps, Exit, Start
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    NEVER,
    UNCLEAR,
    Evidence,
    Finding,
    Kind,
    at_line,
    consequences,
    innermost,
    last_call,
    list_ranks,
    name_call,
    on_host,
    places_of,
    shortened,
    waits_for_others,
)

_AFTER_ALL = NEVER
_names = {int(each): each.name for each in signal.Signals}
_SLACK_NS = 100_000_000
_BY_SIGNAL: dict[int, str] = {
    signal.SIGSEGV: "run it with PYTHONFAULTHANDLER=1, and look at the extension called last",
    signal.SIGBUS: "check that /dev/shm and mapped files have space: `df /dev/shm`",
    signal.SIGABRT: "see the end of its log: a library called abort() and says why",
    signal.SIGTERM: "find out what sent SIGTERM: a scheduler's time limit or preemption, or `kill`",
    signal.SIGINT: "find out what sent SIGINT: Ctrl-C in its terminal, or `kill -INT`",
}


def find_left(evidence: Evidence) -> list[Finding]:
    """Find a rank that ended without an error while a call of its own was still running."""
    found = []
    for rank, dump in evidence.dumps.ranks.items():
        open_ = dump.pending
        if dump.reason == "exit" and open_ and not dump.events and not _came_after(evidence, rank):
            found.append((evidence.ends_at(rank), rank, open_[0]))
    if not found or len(found) == len(evidence.dumps.world):
        return []
    when, rank, call = min(found, key=lambda each: each[:2])
    return [
        Finding(
            Kind.FINISHED,
            (rank,),
            f"rank {rank} ended while its {name_call(call)} was still running: nothing waited for "
            "its handle",
            tuple(consequences(evidence.dumps, [rank])),
            ("call wait() on the handle that this line returns",),
            call.op,
            call.group,
            call.number,
            (f"{call.filename}:{call.line}",),
            time=when,
        )
    ]


def find_crash(evidence: Evidence) -> list[Finding]:
    """Find a rank whose process crashed in C."""
    own = {r: c for r, c in evidence.dumps.crashes.items() if not _by_message(c)}
    return _first_of(evidence.dumps, own)


def find_aborted(evidence: Evidence) -> list[Finding]:
    """Find a process that a backend aborted, because of another rank's message."""
    crashes = {r: c for r, c in evidence.dumps.crashes.items() if _by_message(c)}
    # it ranks after its cause, whenever that was recorded
    return [replace(finding, time=_AFTER_ALL) for finding in _first_of(evidence.dumps, crashes)]


def _first_of(dumps: Dumps, crashes: Mapping[int, Crash]) -> list[Finding]:
    if not crashes:
        return []
    rank, crash = min(crashes.items(), key=lambda item: item[1].time)
    return [replace(_crashed(dumps, rank, crash), time=crash.time)]


def _by_message(crash: Crash) -> bool:
    """Return True if a backend aborted the process, because of another rank's message."""
    autograd = any("/torch/autograd/" in str(frame["filename"]) for frame in crash.frames[:1])
    waits = autograd or waits_for_others(crash.frames) or not crash.in_python
    return crash.why.startswith("Aborted") and waits


def _crashed(dumps: Dumps, rank: int, crash: Crash) -> Finding:
    at = innermost(crash.frames)
    blamed = () if _by_message(crash) else (rank,)
    whose = "" if blamed else "; another rank may have sent an unexpected message"
    thread = "" if crash.in_main else ", in a thread other than the main one"
    remedies: tuple[str, ...] = (
        "look at the extension or library that this line calls, and at the arguments it gets",
        "run this rank alone under gdb, or with PYTHONFAULTHANDLER=1, to see the stack in C",
    )
    if crash.why.startswith("Bus error"):
        remedies = (_BY_SIGNAL[signal.SIGBUS],)
    if crash.why.startswith("Aborted"):
        remedies = (_BY_SIGNAL[signal.SIGABRT],)
    if not blamed:
        remedies = (
            "check that all ranks call the same collective with the same sizes: Gloo aborts a "
            "process that receives an unexpected size",
            "run with GRADWIRE_CHECKS=1 or on shm, which compare the calls first",
        )
    return Finding(
        Kind.CRASHED,
        blamed,
        f"rank {rank}'s process crashed in C ({crash.why}{thread}) while it was "
        f"{at or 'in no Python code'}{whose}",
        tuple(consequences(dumps, [rank])),
        remedies,
        places=tuple(places_of(crash.frames)[:1]),
        confidence="" if blamed else UNCLEAR,
    )


def find_killed(evidence: Evidence) -> list[Finding]:
    """Find ranks that a signal ended, and that nothing else had failed before."""
    dumps = evidence.dumps
    killed = {
        rank: exit_
        for rank, exit_ in sorted(dumps.exits.items())
        if exit_.code < 0
        and rank not in dumps.crashes
        and not (rank in dumps.ranks and dumps.ranks[rank].events)
    }
    # launchers end ranks by SIGTERM first
    slack = {
        rank: _SLACK_NS if e.code == -signal.SIGTERM else LONG_NS for rank, e in killed.items()
    }
    killed = {r: e for r, e in killed.items() if not _came_after(evidence, r, slack[r])}
    if -signal.SIGKILL in {exit_.code for exit_ in killed.values()}:
        killed = {r: e for r, e in killed.items() if e.code == -signal.SIGKILL}
    if not killed or (len(killed) == len(dumps.world) > 1):
        return []
    ranks = list(killed)
    when = min(evidence.ends_at(rank) for rank in ranks)
    return [replace(_killed(evidence, ranks), time=when)]


def _came_after(evidence: Evidence, rank: int, slack: int = _SLACK_NS) -> bool:
    """Return True if a rank still ran when another one had failed: it was ended for that.

    A dying process closes its connections before its state changes.
    """
    failed = min((evidence.fails_at(r) for r in evidence.dumps.ranks if r != rank), default=NEVER)
    dump = evidence.dumps.ranks.get(rank)
    if dump is not None and dump.reason == "exit":
        return evidence.ends_at(rank) > failed
    return _last_seen(evidence, rank) > failed + slack


def find_stopped(evidence: Evidence) -> list[Finding]:
    """Find a stopped process."""
    for rank, state in sorted(evidence.states.items()):
        if state.startswith("stopped"):
            trace = evidence.trace(rank)
            stack = evidence.last_stack(rank)
            finding = Finding(
                Kind.STOPPED,
                (rank,),
                f"rank {rank}'s process was {state}{at_line(stack)}, neither running nor dead, and "
                "the others waited",
                tuple(consequences(evidence.dumps, [rank])),
                (
                    "continue it: kill -CONT",
                    "find out what stopped it: SIGSTOP, a debugger, Ctrl-Z in a terminal, a frozen "
                    "container",
                ),
                places=tuple(places_of(stack)[:1]),
                time=trace.beat if trace is not None else 0,
            )
            return [finding]
    return []


def find_exit(evidence: Evidence) -> list[Finding]:
    """Find a rank that ended itself with a code or a text, or by `os._exit`, before the others."""
    dumps, found = evidence.dumps, []
    for rank in dumps.world:
        dump, exit_ = dumps.ranks.get(rank), dumps.exits.get(rank)
        if evidence.primary.get(rank) or rank in dumps.crashes or (dump and dump.events):
            continue
        call = dump.exit if dump is not None and dump.reason == "exit" else None
        code = exit_.code if exit_ is not None else call.code if call is not None else 0
        if code < 0 or (code == 0 and (call is None or call.how != "os._exit")):
            continue
        when = evidence.ends_at(rank)
        if exit_ is not None and when == NEVER:
            when = exit_.time
        if not _came_after(evidence, rank):
            found.append((when, rank, code))
    if not found:
        return []
    when, rank, code = min(found)
    if len(found) == len(dumps.world) > 1:
        return [_all_exited(code, when)]
    return [replace(_exited(dumps, rank, code), time=when)]


def _all_exited(code: int, when: int) -> Finding:
    return Finding(
        Kind.DIED,
        (),
        f"all ranks ended themselves, the first with exit code {code}, and none had an error",
        remedies=("see the end of their logs",),
        time=when,
        confidence=UNCLEAR,
    )


def _exited(dumps: Dumps, rank: int, code: int) -> Finding:
    dump = dumps.ranks.get(rank)
    call = dump.exit if dump is not None else None
    lines = call.lines if call is not None else ()
    how = f"ended with exit code {code}"
    if call is not None:
        how = f"called {call.how}{at_line(lines)} and ended with exit code {code}"
        how += f", saying: {shortened(' '.join(call.text.split()), 300)}" if call.text else ""
    elif dump is None:
        how += " without a dump"
    remedies: tuple[str, ...] = ("see why this rank takes this way out, and the others do not",)
    if call is None:
        remedies = ("see the end of its log: SystemExit was raised, or os._exit was called in C",)
    return Finding(
        Kind.DIED,
        (rank,),
        f"rank {rank}{on_host(dumps, [rank])} {how}, before the other ranks",
        (f"rank {rank}: {last_call(dumps, rank, None)}", *consequences(dumps, [rank])),
        remedies,
        places=tuple(places_of(lines)[:1]),
    )


def find_gone(evidence: Evidence) -> list[Finding]:
    """Find the one rank whose process had ended without a dump when the others failed."""
    dumps, states = evidence.dumps, evidence.states
    over = {rank for rank, state in states.items() if state in ENDED}
    over |= {rank for rank, exit_ in dumps.exits.items() if exit_.code and rank not in states}
    over |= {rank for rank in dumps.exits if rank not in dumps.ranks}
    gone = [
        rank
        for rank in sorted(over)
        if not _ended_by_itself(dumps, rank)
        and rank not in dumps.crashes
        and not _came_after(evidence, rank)
        and _last_seen(evidence, rank) < _first_end(dumps)
    ]
    if len(gone) != 1 or _late_before(evidence):
        return []
    return [replace(_killed(evidence, gone), time=evidence.ends_at(gone[0]))]


def _last_seen(evidence: Evidence, rank: int) -> int:
    trace, dump = evidence.trace(rank), evidence.dumps.ranks.get(rank)
    seen = [other.alive.get(rank, 0) for other in evidence.dumps.ranks.values()]
    written = dump.taken if dump is not None else 0
    return max([trace.beat if trace is not None else 0, written, *seen])


def _first_end(dumps: Dumps) -> int:
    """Return the time of the first failure in the dumps."""
    last = [dump.events[-1] for dump in dumps.ranks.values() if dump.events]
    uncaught = [event.time for event in last if event.kind == "uncaught"]
    times = uncaught or [event.time for event in last]
    return min(times, default=max((dump.taken for dump in dumps.ranks.values()), default=0) + 1)


def _late_before(evidence: Evidence) -> bool:
    """Return True if ranks had waited for a living rank for longer than a death goes unnoticed."""
    for gap in evidence.gaps:
        since = min(call.created for call in gap.calls.values())
        for rank in gap.missing:
            taken = evidence.dumps.ranks[rank].taken
            if evidence.standing(rank) is None and taken - since > LONG_NS:
                return True
    return False


def _ended_by_itself(dumps: Dumps, rank: int) -> bool:
    """Return True if the process wrote a dump at its end, or recorded an error."""
    dump = dumps.ranks.get(rank)
    return dump is not None and (dump.reason == "exit" or bool(dump.events))


def _killed(evidence: Evidence, ranks: Sequence[int]) -> Finding:
    dumps = evidence.dumps
    exit_ = dumps.exits.get(ranks[0])
    how, remedies = _how_it_ended(exit_)
    if len(ranks) > 1:
        how = how.replace("was ", "were ", 1)
    stack = evidence.last_stack(ranks[0])
    at = f"; shortly before, it was {innermost(stack)}" if innermost(stack) else ""
    return Finding(
        Kind.DIED,
        tuple(ranks),
        f"{list_ranks(ranks)}{on_host(dumps, ranks)} {how}{at}",
        (
            *(f"rank {rank}: {last_call(dumps, rank, None)}" for rank in ranks),
            *consequences(dumps, ranks),
        ),
        remedies,
        places=tuple(places_of(stack)[:1]),
    )


def _how_it_ended(exit_: Exit | None) -> tuple[str, tuple[str, ...]]:
    out_of_memory = (
        "raise the container's memory limit, or use less: a smaller batch, fewer workers"
    )
    look = "look for `Killed process` in the kernel's log (dmesg), and at the host's free memory"
    if exit_ is None:
        return "was killed or ended without a dump", (look,)
    if exit_.code >= 0:
        remedy = "see its log: os._exit was called, or it ended while Python was not running"
        return f"ended with exit code {exit_.code} without a dump", (remedy,)
    how = f"was ended by {_names.get(-exit_.code, f'signal {-exit_.code}')}"
    if exit_.oom_killed:
        return f"{how}, by the kernel's out-of-memory killer", (out_of_memory,)
    if exit_.code == -signal.SIGKILL:
        sent = "find out whether a scheduler or a person sent SIGKILL"
        return how, (look, sent)
    number = -exit_.code
    return how, (_BY_SIGNAL.get(number, "find out what sent this signal"),)


_LOCAL = ("localhost", "127.", "::1")
_MUST_AGREE = ("MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE")
_LOST_STORE = {"DistNetworkError", "DistStoreError"}


def _began(evidence: Evidence) -> bool:
    """Return True if a rank has made a collective, so that all ranks were there."""
    dumps = evidence.dumps
    calls = any(of for dump in dumps.ranks.values() for of in dump.calls.values())
    return calls or any(
        trace.calls or any(trace.counts.values()) for trace in dumps.traces.values()
    )


def find_same_rank(evidence: Evidence) -> list[Finding]:
    """Find two processes that were started with the same RANK."""
    starts = evidence.dumps.starts
    doubled = [rank for rank, n in Counter(start.rank for start in starts).items() if n > 1]
    if _began(evidence) or not doubled:
        return []
    rank = doubled[0]
    of = [start for start in starts if start.rank == rank]
    who = " and ".join(f"process {start.pid} on {start.host}" for start in of)
    expected = range(_world_size(of[0]) or 0)
    lacking = sorted(set(expected) - {start.rank for start in starts})
    lacks = f"; no process has RANK {', '.join(map(str, lacking))}" if lacking else ""
    return [
        Finding(
            Kind.START,
            (rank,),
            f"{len(of)} processes were started with RANK={rank}: {who}{lacks}",
            tuple(_variables(start) for start in of),
            (
                "give each process a RANK of its own, from 0 to WORLD_SIZE - 1",
                "on several hosts, RANK is node rank * processes per host + LOCAL_RANK",
            ),
            time=1,
        )
    ]


def find_other_values(evidence: Evidence) -> list[Finding]:
    """Find ranks that were started with another address, port or number of ranks."""
    starts = evidence.dumps.starts
    if _began(evidence) or len(starts) < 2:
        return []
    for name in _MUST_AGREE:
        values = Counter(start.launch.get(name, "(not set)") for start in starts)
        if len(values) < 2:
            continue
        (common, times), (_, next_times) = values.most_common(2)
        changed = sorted(
            {s.rank for s in starts if s.was and s.was.get(name) != s.launch.get(name)}
        )
        few = sorted({s.rank for s in starts if s.launch.get(name, "(not set)") != common})
        named = few if times > next_times else changed if len(changed) < len(starts) else []
        why = f"; the program changed it on {list_ranks(changed)}" if changed else ""
        shown = ", ".join(
            f"{list_ranks([s.rank for s in starts if s.launch.get(name, '(not set)') == value])} "
            f"{name}={value}"
            for value in values
        )
        return [
            Finding(
                Kind.START,
                tuple(named),
                f"the ranks were started with different values of {name}: {shown}; they look for "
                f"each other in different places{why}",
                tuple(consequences(evidence.dumps, few)),
                (f"set the same {name} for all ranks",),
                time=1,
                confidence="" if named else UNCLEAR,
            )
        ]
    return []


def find_never_started(evidence: Evidence) -> list[Finding]:
    """Find ranks of which no process was seen, while all others wait for them to join."""
    dumps = evidence.dumps
    sizes = {_world_size(start) for start in dumps.starts}
    if _began(evidence) or len(sizes) != 1 or not dumps.starts:
        return []
    size = sizes.pop() or 0
    seen = {start.rank for start in dumps.starts} | set(dumps.ranks)
    lacking = sorted(set(range(min(size, 1 << 16))) - seen)
    if not lacking or any(events for events in evidence.primary.values()):
        return []
    local = all(s.launch.get("MASTER_ADDR", "").startswith(_LOCAL) for s in dumps.starts)
    stack = next((dump.stack for dump in dumps.ranks.values() if dump.stack), [])
    where = "" if local else ", or write to another directory"
    return [
        Finding(
            Kind.START,
            tuple(lacking) if local else (),
            f"{list_ranks(lacking)} {'was' if len(lacking) == 1 else 'were'} never started{where}: "
            f"WORLD_SIZE is {size}, and {list_ranks(sorted(seen))} were seen",
            tuple(f"the others wait{at_line(stack)}" for _ in [1] if stack),
            (
                f"start a process for each rank from 0 to {size - 1}",
                f"or set WORLD_SIZE to {len(seen)} on all of them",
            ),
            places=tuple(places_of(stack)[:1]),
            time=1,
            confidence="" if local else UNCLEAR,
        )
    ]


def find_store_gone(evidence: Evidence) -> list[Finding]:
    """Find that rank 0 has ended, whose process held the store that the others use."""
    dumps = evidence.dumps
    lost = {
        rank: event
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if not _LOST_STORE.isdisjoint((event.type, *event.chain))
    }
    if not lost or 0 in lost or not evidence.is_over(0) or evidence.gaps:
        return []
    event = min(lost.values(), key=lambda each: each.time)
    if evidence.ends_at(0) > event.time:
        return []
    return [
        Finding(
            Kind.FINISHED,
            (0,),
            f"rank 0 had ended, and with it the store that {list_ranks(sorted(lost))} still needed"
            f"{at_line(event.lines)}",
            tuple(consequences(dumps, [0])),
            (
                "let rank 0 end last: call dist.barrier() at the end of the program on all ranks",
                "or run the store in the launcher, as torchrun and `gradwire run` do",
            ),
            places=tuple(places_of(event.lines)[:1]),
            time=evidence.ends_at(0),
        )
    ]


def _world_size(start: Start) -> int | None:
    text = start.launch.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def _variables(start: Start) -> str:
    values = " ".join(f"{name}={value}" for name, value in sorted(start.launch.items()))
    return f"process {start.pid} on {start.host}: {values}"
