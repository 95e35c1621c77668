"""Recording of a timeline: everything that begins in a block, from all ranks, in one file.

Each rank writes a part file next to the output, and rank 0 merges them. Nothing is sent between
ranks at the end, since a rank may have failed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from gradwire._groups import find_store
from gradwire._processes import wait_until
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.groups import at_end_of_job, known_groups, this_rank
from gradwire.recorder.recording import CollectionRecord, ring
from gradwire.recorder.trace.chrome import part_of, trace_of
from gradwire.recorder.trace.clocks import Offset, find_offset, this_clock

VARIABLE = "GRADWIRE_TIMELINE"
_WAIT_SECONDS = 30.0  # rank 0's wait for the other ranks' parts
_COLLECTION_NS = 1_000_000  # shorter ones are not recorded
_MOST = 200_000  # records per rank; later ones are only counted


class Recording:
    """Recording of this rank from now on.

    Args:
        path: Output file of all ranks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = Offset(0, 0)
        self._records: list[Any] = []
        self._left_out = 0
        self._written = -1
        self._pid = os.getpid()
        self._collecting = 0
        self._collections: list[CollectionRecord] = []  # apart: alone, they are not written
        ring.listener = self._take
        gc.callbacks.append(self._on_collection)

    def _take(self, record: Any) -> None:
        if not self._records and self._written < 0:
            self.forget_earlier()
        if len(self._records) < _MOST:
            self._records.append(record)
        else:
            self._left_out += 1

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = perf_counter_ns()
        if phase == "start":
            self._collecting = now
        elif now - self._collecting > _COLLECTION_NS and len(self._collections) < _MOST:
            self._collections.append(CollectionRecord(self._collecting, now))

    def forget_earlier(self) -> None:
        """Remove this rank's part file of an earlier run that was not merged."""
        rank = this_rank()
        if rank is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._part(rank).unlink(missing_ok=True)

    def write(self) -> None:
        """Write this rank's part; on rank 0, wait for all parts and merge them."""
        rank, count = this_rank(), len(self._records)
        if rank is None or os.getpid() != self._pid or count == self._written:
            return
        self._written = count
        groups = known_groups()
        size = len(groups["0"].ranks) if "0" in groups else rank + 1
        records = [*self._records[:count], *self._collections]
        part = part_of(rank, records, groups, self.offset)
        part["left_out"] = self._left_out
        _write_whole(self._part(rank), part)
        if rank == 0:
            self._merge(size)

    def stop(self) -> None:
        """Stop recording."""
        if ring.listener == self._take:
            ring.listener = None
            gc.callbacks.remove(self._on_collection)

    def _part(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{rank}.part")

    def _merge(self, size: int) -> None:
        files = [self._part(rank) for rank in range(size)]
        wait_until(lambda: all(file.exists() for file in files), _WAIT_SECONDS)
        there = [file for file in files if file.exists()]
        parts = [json.loads(file.read_text()) for file in there]
        _write_whole(self.path, trace_of(parts))
        for file in there:
            file.unlink()


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record a timeline of each rank within a block, which all ranks enter and leave.

    Rank 0 writes one file for all ranks, on a shared file system. Perfetto (ui.perfetto.dev) and
    chrome://tracing open this trace, and `gradwire timeline` converts it to a summary and a page.
    Clocks of different hosts are compared on entry. The first 200,000 records of each rank are
    kept; the trace and its summary contain the number of missing records.

    Args:
        path: Output file, such as "run.json".

    Raises:
        ArgumentTypeError: `path` is not a path.
        ArgumentError: There is no default group, the folder of `path` does not exist, or a timeline
            is already being recorded.

    Example:
        >>> import json, pathlib, tempfile, gradwire
        >>> def train():
        ...     model = gradwire.DistributedDataParallel(torch.nn.Linear(2, 2))
        ...     with gradwire.timeline(pathlib.Path(folder) / "run.json"):
        ...         model(torch.ones(1, 2)).sum().backward()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = run_ranks(train, world_size=2)
        ...     trace = json.loads((pathlib.Path(folder) / "run.json").read_text())
        >>> events = trace["traceEvents"]
        >>> sorted({e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0})
        ['backward', 'exposed communication', 'forward']
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"path is {path!r}: pass the path of a file")
    file = Path(path).absolute()
    if not dist.is_initialized():
        raise ArgumentError("there is no default group: call init_process_group first")
    if not file.parent.is_dir():
        raise ArgumentError(f"path is {str(path)!r}, whose folder does not exist: create it first")
    if ring.listener is not None:
        raise ArgumentError("a timeline is already being recorded: leave its block first")
    recording = Recording(file)
    try:
        recording.forget_earlier()  # before ranks synchronize to compare clocks
        recording.offset = _offset()
        yield
    finally:
        recording.stop()
        recording.write()


def start_from_environment() -> None:
    """Record the whole process if GRADWIRE_TIMELINE is set to a file."""
    path = os.environ.get(VARIABLE)
    if not path or ring.listener is not None:
        return
    recording = Recording(Path(path).absolute())  # the program may change its directory

    def write() -> None:
        try:
            recording.write()
        except OSError as error:  # must not fail the end of the program
            print(f"gradwire: {VARIABLE}: no timeline was written: {error}", file=sys.stderr)

    at_end_of_job(write)
    atexit.register(write)


def _offset() -> Offset:
    world = dist.group.WORLD
    store = None if world is None else find_store(world)
    if world is None or store is None:
        return Offset(0, 0)
    count = store.add(f"gradwire/timelines/{world.rank()}", 1)  # equal on all ranks
    own_store = PrefixStore(f"gradwire/timeline/{count}", store)
    return find_offset(own_store, world.rank(), world.size(), this_clock())


def _write_whole(path: Path, content: Any) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)
