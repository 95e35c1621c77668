"""Ranks whose processes ended, are stopped, or were never started as a rank."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gradwire._processes import ENDED, SIGNAL_NAMES
from gradwire.recorder.verdict.dumps import Crash
from gradwire.recorder.verdict.evidence import (
    LIKELY,
    LONG_NS,
    NEVER,
    UNCLEAR,
    Evidence,
    Finding,
    Kind,
    at_line,
    by_ranks,
    list_ranks,
    name_call,
    place_of,
    waits_for_others,
    were,
)

_SLACK_NS = 100_000_000
_TOGETHER_NS = 500_000_000
_LOOK = "look for `Killed process` in the kernel's log (dmesg), and at the host's free memory"
_KILL, _SEGV, _BUS, _ABRT = 9, 11, 7, 6  # on Linux, whose dumps are read on other systems too
_BY_SIGNAL: dict[int, tuple[str, ...]] = {
    _KILL: (_LOOK, "find out whether a scheduler or a person sent SIGKILL"),
    _SEGV: (
        "look at the extension or library that this line calls, and at the arguments it gets",
        "run this rank alone under gdb, or with PYTHONFAULTHANDLER=1, to see the stack in C",
    ),
    _BUS: ("check that /dev/shm and mapped files have space: `df /dev/shm`",),
    _ABRT: ("see the end of its log: a library called abort() and says why",),
}
_LOCAL = ("localhost", "127.", "::1")
_MUST_AGREE = ("MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE")
_LOST_STORE = {"DistNetworkError", "DistStoreError"}


# -- ends ----------------------------------------------------------------------------------------


def find_end(evidence: Evidence) -> Finding | None:
    """Find the rank whose process ended first, before any failure of another one."""
    finders = (_crashed, _ended_first, _left_a_call, _took_the_store)
    found = [finding for find in finders if (finding := find(evidence))]
    return min(found, key=lambda each: (each.confidence == LIKELY, each.time), default=None)


def _crashed(evidence: Evidence) -> Finding | None:
    """Find the process that crashed first in C: by itself, or else because of another's message."""
    if not evidence.dumps.crashes:
        return None
    crashes = evidence.dumps.crashes.items()
    by_message, when, rank = min((_is_by_message(c), c.time, r) for r, c in crashes)
    crash = evidence.dumps.crashes[rank]
    thread = "" if crash.in_main else ", in a thread other than the main one"
    number = {"Bus error": _BUS, "Aborted": _ABRT}.get(crash.why, _SEGV)
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
                ("find out what stopped it (a debugger, Ctrl-Z), and continue it: kill -CONT",),
                places=place_of(stack),
                time=trace.beat if trace is not None else 0,
            )
    return None


def _ended_first(evidence: Evidence) -> Finding | None:
    """Find ranks that a signal, an exit or something unknown ended before any failure."""
    dumps, codes, gone = evidence.dumps, dict[int, int](), list[int]()
    for rank in dumps.world:
        dump, exit_ = dumps.ranks.get(rank), dumps.exits.get(rank)
        if rank in dumps.crashes or (dump and dump.events):
            continue
        call = dump.exit if dump is not None and dump.reason == "exit" else None
        code = exit_.code if exit_ is not None else call.code if call is not None else 0
        # launchers end ranks by SIGTERM first
        slack = LONG_NS if code < 0 and code != -signal.SIGTERM else _SLACK_NS
        if _came_after(evidence, rank, slack):
            continue
        if code or (call is not None and call.how == "os._exit"):
            codes[rank] = code
        elif not evidence.ended(rank):
            gone.append(rank)
    if -_KILL in codes.values():
        codes = {rank: code for rank, code in codes.items() if code == -_KILL}
    first = min(map(evidence.ends_at, codes), default=NEVER)
    # neither clocks nor the scheduler order ends that lie closer together
    codes = {r: c for r, c in codes.items() if evidence.ends_at(r) - first < _TOGETHER_NS}
    stands = [at for rank, at in evidence.standings.items() if rank not in codes]
    met = evidence.began or any(stands)  # else, the others might have ended likewise
    exits = bool(codes) and min(codes.values()) >= 0
    if (exits and not met) or (len(codes) > 1 and (exits or len(codes) == len(dumps.world))):
        said = " and ".join(sorted({f"exit code {code}" for code in codes.values()}))
        lines = [e.lines for r in codes if r in dumps.ranks and (e := dumps.ranks[r].exit)]
        when = "at the same time" if met else "before the ranks met"
        return Finding(
            Kind.DIED if met else Kind.NOTHING,
            (),
            f"{list_ranks(list(codes))} ended {when}, with {said}"
            f"{at_line(lines[0]) if lines else ''}, and without an error",
            ("see the end of their logs: all may have left for the same reason",),
            places=place_of(lines[0]) if lines else (),
            time=first,
        )
    if codes:
        return _ended(evidence, list(codes))
    found = _left_without_a_dump(evidence, gone)
    return found and replace(found, confidence=LIKELY)


def _left_without_a_dump(evidence: Evidence, ranks: Sequence[int]) -> Finding | None:
    """Find the one rank whose process had ended without a dump when the others failed."""
    dumps, states = evidence.dumps, evidence.states
    gone = [
        rank
        for rank in ranks
        if states.get(rank) in ENDED or (rank in dumps.exits and rank not in dumps.ranks)
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
    remedies: Sequence[str] = (_LOOK,)
    if call is not None:
        how = f"called {call.how}{at_line(stack)} and ended before the others with exit code {code}"
        how += f", saying: {' '.join(call.text.split())[:300]}" if call.text else ""
        remedies = ("see why this rank takes this way out, and the others do not",)
    elif exit_ is None:
        how = "ended, or was killed, without a dump"
    elif code >= 0:
        how = f"ended before the others with exit code {code}"
        remedies = ("see the end of its log: SystemExit was raised, or os._exit was called in C",)
    else:
        how = f"ended by {SIGNAL_NAMES.get(-code, f'signal {-code}')}"
        remedies = _BY_SIGNAL.get(-code, ("find out what sent it, such as a time limit",))
        if exit_.oom_killed:
            how += ", by the kernel's out-of-memory killer"
            remedies = ("raise its memory limit, or use less: a smaller batch, fewer workers",)
    return Finding(
        Kind.DIED,
        ranks,
        f"{list_ranks(ranks)} {how}{shortly}",
        remedies,
        by_ranks({rank: evidence.last_call(rank) for rank in ranks}),
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


def _left_a_call(evidence: Evidence) -> Finding | None:
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
    finding = Finding(Kind.FINISHED, (rank,), summary, remedies, places=(call.place,), time=when)
    return replace(finding, confidence=LIKELY)


# -- start-up ------------------------------------------------------------------------------------


def find_start(evidence: Evidence) -> Finding | None:
    """Find ranks that cannot find each other: by their variables, or because one is absent."""
    if evidence.began:
        return None
    return _same_rank(evidence) or _other_variables(evidence) or _never_started(evidence)


def _same_rank(evidence: Evidence) -> Finding | None:
    starts = evidence.dumps.starts
    doubled = [rank for rank, n in Counter(start.rank for start in starts).items() if n > 1]
    if not doubled:
        return None
    rank = doubled[0]
    of = [start for start in starts if start.rank == rank]
    who = " and ".join(f"process {start.pid} on {start.host}" for start in of)
    size = of[0].launch.get("WORLD_SIZE", "")
    expected = range(int(size) if size.isdecimal() else 0)
    lacking = sorted({*expected} - {start.rank for start in starts})
    lacks = f"; no process has RANK {', '.join(map(str, lacking))}" if lacking else ""
    return Finding(
        Kind.START,
        (rank,),
        f"{len(of)} processes were started with RANK={rank}: {who}{lacks}",
        ("give each process a RANK of its own: node rank * processes per host + LOCAL_RANK",),
        time=1,
    )


def _other_variables(evidence: Evidence) -> Finding | None:
    """Find ranks that were started with another address, port or number of ranks."""
    starts = evidence.dumps.starts
    for name in _MUST_AGREE:
        by_value: dict[str, list[int]] = {}
        for start in starts:
            by_value.setdefault(start.launch.get(name, "(not set)"), []).append(start.rank)
        if len(by_value) < 2:
            continue
        most, second, *_ = sorted(by_value.values(), key=len, reverse=True)
        few = sorted({start.rank for start in starts} - {*most})
        shown = ", ".join(f"{list_ranks(of)} {name}={value}" for value, of in by_value.items())
        return Finding(
            Kind.START,
            few if len(most) > len(second) else (),
            f"the ranks have different values of {name}: {shown}; they look for each other in "
            "different places",
            (f"set the same {name} for all ranks",),
            time=1,
        )
    return None


def _never_started(evidence: Evidence) -> Finding | None:
    """Find ranks of which no process was seen, while all others wait for them to join."""
    dumps = evidence.dumps
    sizes = {start.launch.get("WORLD_SIZE", "") for start in dumps.starts}
    if len(sizes) != 1 or any(evidence.primary.values()):
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
    how = "not seen yet, and may still import PyTorch" if evidence.live else "never started"
    return Finding(
        Kind.START,
        lacking if local else (),
        f"{were(lacking)} {how}{where}: WORLD_SIZE is {size}, and {were(sorted(seen))} seen",
        (f"start {size} processes, with RANK from 0 to {size - 1}, or set another WORLD_SIZE",),
        [f"the others wait{at_line(stack)}"],
        place_of(stack),
        time=1,
        confidence=LIKELY if local else UNCLEAR,
    )


def _took_the_store(evidence: Evidence) -> Finding | None:
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
        confidence=LIKELY,
    )
