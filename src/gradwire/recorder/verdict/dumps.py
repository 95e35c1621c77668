"""Contents of dumps, as plain records that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNEVEN = {"all_to_all", "all_to_all_single", "all_gather", "gather", "scatter", "reduce_scatter"}


@dataclass(frozen=True)
class Call:
    """Collective of one rank.

    Attributes:
        group: Name of the group.
        number: Number of the collective in the group.
        op: Name of the operation.
        sizes, dtypes: Sizes and dtypes of the tensors sent.
        filename, line, function: Line that called it; "" if unknown.
        done: True if it has ended without an error.
        created, started, ended: Wall-clock times in ns; 0 if not yet.
        waits: Time spent waiting for each global rank, in ns.
        parameters: Parameters of its bucket.
        step: Number of the reducer's backward pass.
        error: Error it failed with.
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
        """File and line."""
        return self.filename, self.line

    @property
    def what(self) -> tuple[Any, ...]:
        """Properties that must be equal on all ranks."""
        return (self.op, self.dtypes) if self.op in _UNEVEN else (self.op, self.dtypes, self.sizes)

    @property
    def nbytes(self) -> int:
        """Number of bytes sent."""
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
    """Error of a rank, with the fields of `recorder.events.Event` and wall-clock time in ns."""

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
    raised: bool = False
    reported: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exit:
    """Exit of a rank's process, noted by its launcher; a negative code is a signal's number."""

    code: int
    time: int
    oom_killed: bool = False


@dataclass(frozen=True)
class ExitCall:
    """Call of `sys.exit` or `os._exit`, with the line that made it."""

    how: str
    code: int
    text: str
    time: int
    lines: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Crash:
    """Report of faulthandler about a process that crashed in C.

    Attributes:
        why: Description of the signal.
        frames: Stack of the thread that crashed, innermost frame first.
        time: Time of the crash.
        in_main: True if the main thread crashed, or if it is unknown which thread did.
        in_python: True if it is known which of Python's threads crashed.
    """

    why: str
    frames: list[dict[str, Any]]
    time: int
    in_main: bool = True
    in_python: bool = True


@dataclass(frozen=True)
class Trace:
    """Contents of a rank's ring file, which survives any end of the process.

    Attributes:
        pid: Process that wrote it.
        beat: Last time when Python ran in it.
        counts: Number of collectives of each group at that time.
        stack: Frames of the main thread at that time, innermost first.
        calls: Last calls, with keys "group", "number", "op", "sizes", "dtype", "line", "begin",
            "end".
    """

    pid: int
    beat: int
    counts: Mapping[str, int]
    stack: list[dict[str, Any]]
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """Process that was started as a rank, with the launcher's variables.

    Attributes:
        rank, pid, host: Rank by the variables, process ID and host.
        launch: Variables when it began to form a group.
        was: Variables when it was started, if the program has changed them since.
    """

    rank: int
    pid: int
    host: str
    launch: Mapping[str, str]
    was: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RankDump:
    """Dump of one rank.

    Attributes:
        rank: Rank that wrote it.
        calls: Collectives by group, in order.
        events: Errors, in order.
        stack: Stack of the main thread when the dump was written, innermost frame first.
        reason: Reason for writing it; "" in dumps of torch's recorder.
        peers: States of other ranks' processes at that time.
        taken: Time of writing; 0 if unknown.
        alive: Times when other ranks' processes were last seen alive.
        clock: Name of the clock, equal for ranks whose times are comparable; "" if unknown.
        exit: Last call of `sys.exit` or `os._exit`; None if there was none.
        kernel: System call of the main thread and of child processes, as `recorder.kernel` returns.
        pauses: Long garbage collections: begin and duration, in ns.
        silences: Times in which no Python ran: begin, end, and CPU time used, in ns.
        host, pid: Process that wrote it.
        ended: Time when its exit handlers ran; 0 if they have not.
        not_finite: Tensors with NaN or infinity that it was about to send, if that was checked.
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
    exit: ExitCall | None = None
    kernel: Mapping[str, Any] = field(default_factory=dict)
    pauses: list[tuple[int, int]] = field(default_factory=list)
    silences: list[tuple[int, int, int]] = field(default_factory=list)
    host: str = ""
    pid: int = 0
    ended: int = 0
    not_finite: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pending(self) -> list[Call]:
        """Collectives that have not ended, oldest first."""
        waiting = [call for calls in self.calls.values() for call in calls if not call.done]
        return sorted(waiting, key=lambda call: call.created)

    def waits_in(self, group: str) -> bool:
        """Return True if a collective of a group has not ended."""
        return any(call.group == group for call in self.pending)


@dataclass
class Dumps:
    """Contents of a directory of dumps.

    Attributes:
        ranks: Dumps by rank.
        groups: Global ranks of each group.
        descriptions: Descriptions of the groups.
        world: All ranks of the job.
        exits: Exits of processes, by rank; empty if no launcher noted them.
        crashes: Crashes in C, by rank.
        messages: Messages between two ranks, each with the rank that recorded it.
        traces: Contents of ring files, by rank.
        stacks: Stacks of the main threads of ranks that did not answer a request, by rank.
        kernel: Kernel's view of these ranks' processes, by rank.
        starts: Processes that were started as ranks.
        first: Function that reads a rank's dump at the first failure; None if there is none.
        damaged: Ranks whose dumps cannot be read.
        earlier: Ranks whose dumps belong to an earlier run; they are not in `ranks`.
    """

    ranks: dict[int, RankDump]
    groups: dict[str, list[int]]
    descriptions: dict[str, str]
    world: list[int]
    exits: dict[int, Exit]
    crashes: dict[int, Crash]
    messages: list[tuple[int, dict[str, Any]]]
    traces: dict[int, Trace] = field(default_factory=dict)
    stacks: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    kernel: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    first: Callable[[int], RankDump | None] = lambda rank: None
    damaged: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)

    def same_clock(self, ranks: Iterable[int]) -> bool:
        """Return True if times of ranks are comparable; assumed for dumps of torch's recorder."""
        return len({self.ranks[rank].clock for rank in ranks if rank in self.ranks}) <= 1

    def calls(self, group: str) -> dict[int, dict[int, Call]]:
        """Return a group's collectives by number and rank."""
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
