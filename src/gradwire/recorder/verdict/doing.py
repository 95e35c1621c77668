"""Activity of a missing rank: its line, and the kernel's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.recorder.verdict.dumps import RankDump
from gradwire.recorder.verdict.evidence import (
    Evidence,
    was_interrupted,
)
from gradwire.recorder.verdict.finding import (
    at_line,
    innermost,
    is_users,
    places_of,
)
from gradwire.recorder.verdict.reading import parse_stacks

_LOADING = "/torch/utils/data/"
Doing = tuple[str, list[str], tuple[str, ...], tuple[str, ...]]
"""Words, details, remedies and lines."""


def what_it_did(evidence: Evidence, rank: int) -> Doing:
    """Return what a missing rank was doing: words, details, remedies and lines."""
    dump = evidence.dumps.ranks[rank]
    if dump.reason == "exit":
        call = dump.exit
        lines = call.lines if call is not None else ()
        how = f"had called {call.how}{at_line(lines)}" if call is not None else "had ended"
        words = f"{how}, and ended with exit code {call.code}" if call is not None else how
        remedies = (
            "find out why its loop ended before the others': a shorter dataset, an early `break`",
            "or use join() for uneven inputs",
        )
        return words, [], remedies, tuple(places_of(lines)[:1])
    if dump.events and was_interrupted(dump.events[-1]):
        at = at_line(dump.events[-1].lines)
        remedy = "find out what sent SIGINT: Ctrl-C in a terminal, a launcher, a debugger"
        return f"was interrupted{at}", [], (remedy,), tuple(places_of(dump.events[-1].lines)[:1])
    return what_it_waited_for(dump)


def what_it_waited_for(dump: RankDump) -> Doing:
    """Return what a rank that runs was in, as in `what_it_did`."""
    where, places = innermost(dump.stack), tuple(places_of(dump.stack)[:1])
    words = f"was {where}" if where else "was in other code"
    call, children = dump.kernel.get("call"), list(dump.kernel.get("children", ()))
    if call in ("flock", "fcntl"):
        return _at_lock(words, dump.kernel, places)
    if call == "read" and dump.kernel.get("descriptor") == 0:
        words += ", waiting for input from its terminal (standard input)"
        return words, [], ("do not ask for input in a rank: pass it as an argument",), places
    if any(_LOADING in str(frame["filename"]) for frame in dump.stack):
        return _in_loader(words, children, places)
    if call == "wait" and children:
        return _for_child(words, children, places)
    remedies = (
        "find out what that line waits for or computes: a lock, an endless loop, a file system",
        "if it is slow by purpose (evaluation, a checkpoint), do it on all ranks, or set a longer "
        "timeout for the group",
    )
    return words, [], remedies, places


def _at_lock(words: str, kernel: Mapping[str, Any], places: tuple[str, ...]) -> Doing:
    holder = kernel.get("holder")
    held = f"process {holder}" if holder else "another process"
    words += f", waiting for a lock on the file {kernel.get('file', '')} that {held} holds"
    remedies = (
        f"see what {held} does: `ps -fp {holder or 'PID'}`",
        "give the lock a timeout, and release it before the next collective",
    )
    return words, [], remedies, places


def _for_child(words: str, children: Sequence[Mapping[str, Any]], places: tuple[str, ...]) -> Doing:
    blocked = [child for child in children if child.get("full pipe")]
    child = (blocked or children)[0]
    words += f", waiting for its child process {child['pid']}"
    remedy = "see what the child process does, and give the wait a timeout"
    if blocked:
        words += ", which is blocked writing to a pipe that is full"
        remedy = "read the child's output while it runs: use subprocess.run or communicate()"
    return words, [f"the child is: {child.get('command', '')}"], (remedy,), places


def _in_loader(words: str, children: Sequence[Mapping[str, Any]], places: tuple[str, ...]) -> Doing:
    """Describe a rank that waits for its data loader's workers."""
    stuck = []
    for child in children:
        stacks = parse_stacks(str(child.get("stack", ""))) if child.get("stack") else []
        frames = stacks[-1][1] if stacks else []
        if innermost(frames) and not _idle_worker(frames):
            stuck.append((child["pid"], frames))
    words += ", waiting for its data loader"
    remedy = "look at the dataset's __getitem__ and at the storage that it reads"
    if not stuck:
        return words, [], (remedy, "pass a timeout to the DataLoader"), places
    pid, frames = stuck[0]
    words += f": worker process {pid} is {innermost(frames)}"
    lines = tuple(places_of(frames)[:1])
    return words, [], ("find out what that line of the dataset waits for", remedy), lines + places


def _idle_worker(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a loader's worker waits for work, in PyTorch's own loop."""
    for frame in frames:
        if is_users(frame):
            return False
        if str(frame["name"]) == "_worker_loop":
            return True
    return True
