"""What dumps hold, as plain records that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNEVEN = {"all_to_all", "all_to_all_single", "all_gather", "gather", "scatter", "reduce_scatter"}


@dataclass(frozen=True)
class Call:
    """One collective of one rank.

    Attributes:
        group: Its group's name; `number` counts the group's collectives.
        op: Its name.
        sizes: Of what it sends; `dtypes` likewise.
        filename, line, function: Where it was called; "" if that is not known.
        done: Whether it has ended, well.
        created, started, ended: In ns of the wall's clock; 0 if it has not.
        waits: For whom it waited, in ns by global rank.
        parameters: Of a bucket; `step` is the reducer's.
        error: What it failed with.
    """

    group: str
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    filename: str
    line: int
    function: str
    done: bool
    created: int
    started: int
    ended: int
    waits: Mapping[int, int]
    parameters: tuple[str, ...]
    step: int | None
    error: str

    @property
    def place(self) -> tuple[str, int]:
        """The file and the line."""
        return self.filename, self.line

    @property
    def what(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return (self.op, self.dtypes) if self.op in _UNEVEN else (self.op, self.dtypes, self.sizes)

    @property
    def nbytes(self) -> int:
        """What it sends."""
        width = _BYTES.get(self.dtypes[0], 4) if self.dtypes else 0
        return sum(_product(size) for size in self.sizes) * width


_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


@dataclass(frozen=True)
class Event:
    """An error of a rank; its fields are those of `recorder.events.Event`, in the wall's ns."""

    kind: str
    type: str
    message: str
    parameters: tuple[str, ...]
    time: int
    lines: tuple[dict[str, Any], ...]
    chain: tuple[str, ...] = ()
    waited: bool = False
    call: str = ""
    values: Mapping[int, str] = field(default_factory=dict)
    own: bool = False


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, as its launcher saw it: a negative code is a signal's number."""

    code: int
    time: int
    oom_killed: bool = False


@dataclass(frozen=True)
class Crash:
    """What Python wrote when a process crashed in C.

    Attributes:
        why: The signal, in words.
        frames: The main thread, the innermost frame first.
        time: When.
    """

    why: str
    frames: list[dict[str, Any]]
    time: int


@dataclass
class RankDump:
    """What one rank left.

    Attributes:
        rank: The rank.
        calls: Its collectives, by group, in order.
        events: Its errors, in order.
        stack: Its main thread, the innermost frame first, when the dump was written.
        reason: Why it was written; "" in torch's own.
        peers: What other ranks' processes did then.
        taken: When it was written; 0 if that is not known.
        alive: When other ranks' processes were last seen alive.
        clock: A name that ranks share whose times can be compared; "" if that is not known.
    """

    rank: int
    calls: dict[str, list[Call]]
    events: list[Event] = field(default_factory=list)
    stack: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    peers: dict[int, str] = field(default_factory=dict)
    taken: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    clock: str = ""

    @property
    def pending(self) -> list[Call]:
        """The collectives that have not ended, the first first."""
        waiting = [call for calls in self.calls.values() for call in calls if not call.done]
        return sorted(waiting, key=lambda call: call.created)

    def waits_in(self, group: str) -> bool:
        """Whether it has a collective of a group that has not ended."""
        return any(call.group == group for call in self.pending)


@dataclass
class Dumps:
    """All that was found.

    Attributes:
        ranks: The dumps, by rank.
        groups: The global ranks of each group.
        descriptions: Of the groups.
        world: All ranks there should be.
        exits: Of processes, by rank; empty if no launcher wrote them.
        crashes: Of ranks that crashed in C.
        messages: Between two ranks: each as its dump has it, with the rank.
        damaged: Ranks whose dump cannot be read.
        earlier: Ranks whose dump an earlier run left; it is not in `ranks`.
    """

    ranks: dict[int, RankDump]
    groups: dict[str, list[int]]
    descriptions: dict[str, str]
    world: list[int]
    exits: dict[int, Exit]
    crashes: dict[int, Crash]
    messages: list[tuple[int, dict[str, Any]]]
    damaged: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)

    def same_clock(self, ranks: Iterable[int]) -> bool:
        """Whether the times of ranks can be compared; of torch's own dumps nothing is known."""
        return len({self.ranks[rank].clock for rank in ranks if rank in self.ranks}) <= 1

    def calls(self, group: str) -> dict[int, dict[int, Call]]:
        """A group's collectives, by number and rank."""
        found: dict[int, dict[int, Call]] = {}
        for rank, dump in self.ranks.items():
            for call in dump.calls.get(group, ()):
                found.setdefault(call.number, {})[rank] = call
        return dict(sorted(found.items()))


def _product(size: Sequence[int]) -> int:
    product = 1
    for n in size:
        product *= n
    return product
