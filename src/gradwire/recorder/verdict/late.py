"""Ranks that came when the others had given up waiting for them."""

from __future__ import annotations

from gradwire.recorder.verdict.dumps import Dumps
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks
from gradwire.recorder.verdict.standing import is_primary
from gradwire.recorder.verdict.wording import at_line, last_call, last_of, places_of

__all__ = ["find_late"]

_NOTICED_NS = 1_000_000_000
"""Who waits for a process that ends learns of it in less."""


def find_late(dumps: Dumps) -> Finding | None:
    """Ranks whose error came long after all others had failed in waiting, and ended.

    They did not wait when the others left: it would have ended their wait, too. So messages, and
    collectives that a rank called in the end, show who was missing, where no rank lacks a call.
    """
    ranks = sorted(dumps.ranks, key=lambda rank: _failed_at(dumps, rank))
    waited = all(d.events and not is_primary(d.events[-1], d) for d in dumps.ranks.values())
    if not waited or len(ranks) < len(dumps.world) or not dumps.same_clock({*ranks}):
        return None
    for count in range(1, len(ranks)):
        ended = max(dumps.ranks[rank].taken for rank in ranks[:count])
        if _failed_at(dumps, ranks[count]) > ended + _NOTICED_NS:
            return _late(dumps, sorted(ranks[:count]), sorted(ranks[count:]))
    return None


def _failed_at(dumps: Dumps, rank: int) -> int:
    events = dumps.ranks[rank].events
    return events[-1].time if events else 0


def _late(dumps: Dumps, first: list[int], late: list[int]) -> Finding:
    event = dumps.ranks[late[0]].events[-1]
    seconds = (event.time - max(_failed_at(dumps, rank) for rank in first)) * 1e-9
    call = f" called {event.call}" if event.call else " came"
    who = "it" if len(late) == 1 else f"rank {late[0]}"
    return Finding(
        Kind.MISSING,
        tuple(late),
        f"{list_ranks(late)} did not come while {list_ranks(first)} waited; {who}{call}"
        f"{at_line(event.lines)} {seconds:.1f} s after they had failed",
        tuple(
            [f"rank {r}: {last_of(dumps.ranks[r])}" for r in first[:6]]
            + [f"rank {r}: {last_call(dumps, r, None)}" for r in late[:2] if dumps.ranks[r].calls]
        ),
        "see what it does before that line: a long evaluation, a checkpoint, a data loader; or "
        "give the group a longer timeout",
        places=tuple(places_of(event.lines)[:1]),
    )
