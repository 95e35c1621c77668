"""Rules for runs without failures: late ranks and slow transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from gradwire.recorder.verdict.dumps import Call, Dumps, RankDump
from gradwire.recorder.verdict.evidence import (
    LIKELY,
    TOGETHER,
    Finding,
    Kind,
    for_how_long,
    list_ranks,
    name_line,
)

_SHARE = 0.05  # fraction of the time that the dumps cover
_LEAST_NS = 500_000_000  # less may be the machine's own noise
_MOSTLY = 0.6  # fraction of all lateness, or of one rank's
_CALLS = 3


def find_slow(dumps: Dumps) -> list[Finding]:
    """Find the rank that others waited for, and slow transfers."""
    complete = [
        calls
        for group, ranks in dumps.groups.items()
        for calls in dumps.calls(group).values()
        if len(calls) == len(ranks) > 1
    ]
    if not dumps.same_clock(dumps.ranks):
        complete = [aligned for calls in complete if (aligned := _aligned(calls))]
    if len(complete) < _CALLS:
        return []
    everything = [call for calls in complete for call in calls.values()]
    covered = max(max(c.created, c.ended) for c in everything) - min(c.created for c in everything)
    found = [_late(dumps, complete, covered), _slow_transfer(dumps, complete, covered)]
    return [finding for _, finding in sorted(filter(None, found), key=lambda each: -each[0])]


def _aligned(calls: dict[int, Call]) -> dict[int, Call]:
    """Shift a collective's times to the first rank's clock: it ends at one time everywhere."""
    first, moved = next(iter(calls.values())), {}
    # none if an end is unknown, or if ends differ between ranks, such as those of a broadcast
    if first.op not in TOGETHER or not all(call.ended for call in calls.values()):
        return {}
    for rank, call in calls.items():
        by = first.ended - call.ended
        started = call.started + by if call.started else 0
        moved[rank] = replace(call, created=call.created + by, started=started, ended=first.ended)
    return moved


def _late(
    dumps: Dumps, complete: list[dict[int, Call]], covered: int
) -> tuple[int, Finding] | None:
    """Find the rank that was last for the longest time, and by how much after the one before it."""
    late: dict[int, list[tuple[int, Call]]] = {}
    for calls in complete:
        *_, before, last = sorted(calls.items(), key=lambda item: item[1].created)
        late.setdefault(last[0], []).append((last[1].created - before[1].created, last[1]))
    rank, times = max(late.items(), key=lambda item: sum(t for t, _ in item[1]))
    total = sum(t for t, _ in times)
    everyones = sum(t for of in late.values() for t, _ in of)
    if total < max(_SHARE * covered, _LEAST_NS) or total < _MOSTLY * everyones:
        return None
    worst, call = max(times, key=lambda item: item[0])
    line = f"the {call.op} at {name_line(call.frame)}"
    how = f"was slow: it was last in {len(times)} of {len(complete)} collectives"
    if worst > _MOSTLY * total:
        how = f"was late once, by {for_how_long(worst)}, before {line}"
    cause, remedies = _why_late(dumps.ranks[rank], call, worst, total)
    finding = Finding(
        Kind.SLOW_RANK,
        (rank,),
        f"rank {rank} {how}, and the others waited {for_how_long(total)} for it, "
        f"{min(1, total / covered):.0%} of the time{cause}",
        remedies,
        (
            f"by {for_how_long(median(t for t, _ in times))} each (median), {for_how_long(worst)} "
            f"at most, before {line}",
        ),
        (call.place,),
        rule="slow rank",
        confidence=LIKELY,
    )
    return total, finding


def _why_late(dump: RankDump, call: Call, worst: int, total: int) -> tuple[str, tuple[str, ...]]:
    """Return what the rank recorded about the time before it came, and what to do."""
    collected = sum(took for _, took in dump.pauses)
    silent = [
        (end - begin, cpu)
        for begin, end, cpu in dump.silences
        if begin < call.created and end > call.created - worst
    ]
    if collected > total / 2:
        text = f"; garbage collection took {for_how_long(collected)} in its process"
        return text, (
            "freeze long-lived objects: call gc.freeze() before the loop",
            "or collect between steps on all ranks: gc.disable(), then gc.collect() every n steps",
        )
    if silent:
        longest, cpu = max(silent)
        text = f"; no Python ran in its process for {for_how_long(longest)}, "
        if cpu > longest / 2:
            return text + "while C code held the GIL and computed", (
                "see what extension it calls before that line, which does not release the GIL",
            )
        return text + "and it used no CPU: it was stopped, or C code held the GIL and waited", (
            "see if something stopped it: a debugger, a frozen container, memory that was swapped",
        )
    return "", (
        "find out what this rank does before that line that others do not: its data, logging, "
        "saving, a core shared with another process",
        "record a timeline, which shows each step: gradwire run --timeline run.json",
    )


def _slow_transfer(
    dumps: Dumps, complete: list[dict[int, Call]], covered: int
) -> tuple[int, Finding] | None:
    """Find groups and ranks that spend long in collectives after all ranks have arrived."""
    spent: dict[str, list[tuple[int, int]]] = {}
    blamed: dict[int, list[int]] = {}
    for calls in complete:
        if any(not call.ended or not call.sizes for call in calls.values()):
            continue
        came = max(call.started or call.created for call in calls.values())
        took = max(0, max(call.ended for call in calls.values()) - came)
        first = next(iter(calls.values()))
        spent.setdefault(first.group, []).append((took, first.nbytes))
        times = dict.fromkeys(calls, 0)  # for which each rank was waited for after all had arrived
        for call in calls.values():
            late = max(0, came - (call.started or call.created))
            for rank, waited in call.waits.items():
                # waiting for late ranks is not part of the transfer
                times[rank] = times.get(rank, 0) + max(0, waited - late)
        for rank, time in times.items():
            blamed.setdefault(rank, []).append(time)
    in_groups = {group: sum(took for took, _ in each) for group, each in spent.items()}
    total = sum(in_groups.values())
    if total < max(_SHARE * 5 * covered, _LEAST_NS):
        return None
    rates = {  # in bytes per second
        group: sum(nbytes for _, nbytes in spent[group]) / (took / 1e9)
        for group, took in in_groups.items()
        if took
    }
    ranks = _ranks_of_slow(dumps, rates, blamed)
    whose = f" with {list_ranks(ranks)}" if ranks else ""
    finding = Finding(
        Kind.SLOW_TRANSFER,
        tuple(ranks),
        f"the transfers{whose} were slow: {for_how_long(total)}, {total / covered:.0%} of the "
        f"time, after all ranks had arrived, at {min(rates.values()) / 1e6:.3g} MB/s",
        (
            f"check the network interface (GLOO_SOCKET_IFNAME), core and memory of "
            f"{list_ranks(ranks) if ranks else 'each rank'}",
            "measure the backends on this machine: gradwire doctor",
        ),
        [
            f"group {group} (ranks {dumps.groups[group]}): {value / 1e6:.3g} MB/s"
            for group, value in sorted(rates.items(), key=lambda item: item[1])[:5]
        ],
        rule="slow transfer",
        confidence=LIKELY,
    )
    return total, finding


def _ranks_of_slow(
    dumps: Dumps, rates: Mapping[str, float], blamed: Mapping[int, Sequence[int]]
) -> list[int]:
    """Return the rank that waits show, or ranks in all slow groups and in no fast one."""
    if blamed:
        # one long wait shows no rank: its process may have got no core
        usual = {rank: sum(times) - max(times) for rank, times in blamed.items()}
        rank = max(usual, key=usual.__getitem__)
        if usual[rank] > 2 * sum(sum(v) for r, v in blamed.items() if r != rank):
            return [rank]
    limit = 0.5 * max(rates.values())
    slow = [set(dumps.groups[g]) for g, value in rates.items() if value < limit]
    fast = [set(dumps.groups[g]) for g, value in rates.items() if value >= limit]
    return sorted(set[int].intersection(*slow).difference(*fast)) if slow and fast else []
