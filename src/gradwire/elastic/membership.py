"""Store of a run: its keys, signs of life, and the environment variables that name it.

No member hosts the store. No request blocks: missing keys are polled, and sockets that PyTorch
opened get deadlines. One thread per member writes its sign of life and reads those of the others.
When a member of the generation is dead or silent or has left it, or the next generation was decided
without this member, the thread aborts the group, so that the main thread does not wait longer. A
connection that was lost on one end only does not tell the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from gradwire._processes import is_alive, namespace, this_process
from gradwire._version import __version__
from gradwire.elastic.protocol import Arrival, Decision
from gradwire.errors import ArgumentError, DistributedError, NotSupportedError


def own_connection(store: Store, seconds: float) -> Store:
    """Return a clone of the store whose requests have a deadline."""
    # without a deadline, PyTorch waits for a store whose process hangs, or whose host is
    # unreachable, until the system closes the connection, possibly forever
    before = sockets()
    clone: Store = store.clone()  # type: ignore[attr-defined]
    limit = struct.pack("ll", int(seconds), int(1e6 * (seconds % 1)))
    served = clone
    while isinstance(served, PrefixStore):
        served = served.underlying_store
    port = served.port if isinstance(served, TCPStore) else -1
    for fd, inode in sockets().items():
        if before.get(fd) != inode and port in ports_of(fd):
            with _duplicate(fd) as duplicate:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return clone


def sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by descriptor; empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    """Open a duplicate of a socket, which another thread may close meanwhile."""
    copy = os.dup(fd)
    try:
        blocks = os.get_blocking(copy)
        duplicate = socket.socket(fileno=copy)
        os.set_blocking(copy, blocks)  # socket.setdefaulttimeout changes it, for the original too
    except OSError:  # reused for something else
        os.close(copy)
        raise
    with duplicate:
        yield duplicate


def ports_of(fd: int) -> tuple[int, ...]:
    """Return the ports of a connection: this end's, then the other's; empty for other sockets."""
    with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            return duplicate.getsockname()[1], duplicate.getpeername()[1]
    return ()


BEAT_SECONDS = 0.1
STORE_VARIABLE = "GRADWIRE_ELASTIC_STORE"
MEMBERS_VARIABLE = "GRADWIRE_ELASTIC_MEMBERS"
LAUNCH_VARIABLES = ("GRADWIRE_ELASTIC_LAUNCH", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Variables that identify a launch: a restarted process has the same value."""


def members_of_environment() -> int:
    """Return the number of members that the launcher names; 1 if it names none."""
    text = os.environ.get(MEMBERS_VARIABLE, "1")
    if not text.isdecimal() or not int(text):
        raise ArgumentError(
            f"{MEMBERS_VARIABLE} is {text!r}: give the number of members, 1 or more"
        )
    return int(text)


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return the host and the port of "host:port"; `name` is its option or variable."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError(f"{name} is {text!r}: give host:port, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def store_of_environment(timeout: timedelta) -> Store:
    """Connect to the store that the launcher names."""
    address = os.environ.get(STORE_VARIABLE)
    if address is None:
        raise ArgumentError(
            f"store is None, and {STORE_VARIABLE} is not set: start with "
            "`python -m gradwire.elastic --nproc-per-node N script.py`, or pass a store"
        )
    host, port = parse_address(address, STORE_VARIABLE)
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise DistributedError(
            f"no store answers at {address} ({STORE_VARIABLE}): start it with `python -m "
            f"gradwire.elastic --serve {address}` on its host, and keep it running ({error})"
        ) from error


class Process(NamedTuple):
    """Process of a member."""

    process: str  # identity, from `this_process`
    shares_memory: bool  # it may use shm, with other members of its host
    host: str | None  # host with its namespaces, that of the network included; None if unknown


class Signs(NamedTuple):
    """Signs of life that members have written."""

    beats: dict[int, bytes]  # last sign of life of each member
    left: frozenset[int]
    wanted: bool  # a member has arrived at the requested rendezvous


class Membership:
    """View of one member on the keys of its run."""

    def __init__(self, store: Store, seconds: float, name: str, shares: bool) -> None:
        self._broken = ""
        own = self._ask(own_connection, store, seconds)
        self.store = PrefixStore(f"gradwire/elastic/{name}", own)
        self._processes: dict[int, Process] = {}
        self._decisions: dict[int, Decision] = {}
        host = json.loads(this_process())[0]
        mine = Process(this_process(), shares, host and f"{host} {namespace('net')}")
        self._require(
            "versions",  # others may round or encode differently
            f"torch {torch.__version__} and gradwire {__version__}",
            "this process has {}, but the run was started with {}: use the same versions, or start "
            "a new run from a checkpoint",
        )
        if shares:
            self._require(
                f"user/{mine.host}",  # members on a host share memory
                f"user {os.getuid()}",
                "this process runs as {}, and the other members on this host as {}: start all as "
                "one user, or pass backend='gloo'",
            )
        self._is_stranger, self._name = self._came_as_stranger(), name
        self.number = int(self._ask(self.store.add, "members", 1))
        self._ask(self.store.set, f"left/{self.number}", "")
        self._ask(self.store.set, f"beat/{self.number}", "0")
        self._ask(self.store.set, f"member/{self.number}", json.dumps(mine._asdict()))

    def _require(self, key: str, mine: str, error: str) -> None:
        """Raise unless the first member that wrote the key wrote this."""
        if (first := self.first(key, mine)) != mine:
            raise NotSupportedError(error.format(mine, first))

    def _came_as_stranger(self) -> bool:
        """Return True if the run is done, and this launcher has started no member of it before."""
        launch = next(filter(None, map(os.environ.get, LAUNCH_VARIABLES)), None)
        is_over, key = self.has("finished"), f"launch/{launch}"
        if launch and not is_over:
            self._ask(self.store.set, key, "")
        return is_over and not (launch and self.has(key))

    def process(self, number: int) -> Process | None:
        """Return the process of a member; None if it died before it wrote it."""
        found = self._processes.get(number)
        if found is None and (text := self.get(f"member/{number}")) is not None:
            found = self._processes[number] = Process(**json.loads(text))
        return found

    def first(self, key: str, value: str) -> str:
        """Write a value unless the key has one; return the one that it has."""
        return str(self._ask(self.store.compare_set, key, "", value).decode())

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        return bytes(self._ask(self.store.get, key)) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Return True if a key has a value."""
        return bool(self._ask(self.store.check, [key]))

    # -- rendezvous ------------------------------------------------------------------------

    def arrive(self, rendezvous: int, arrival: Arrival) -> None:
        """Arrive at a rendezvous; once per member."""
        slot = self._ask(self.store.add, f"rendezvous/{rendezvous}/count", 1)
        text = json.dumps(arrival._asdict())
        self._ask(self.store.set, f"rendezvous/{rendezvous}/{slot}", text)

    def count(self, rendezvous: int) -> int:
        """Return the number of arrivals, creating the key if it is missing."""
        return int(self._ask(self.store.add, f"rendezvous/{rendezvous}/count", 0))

    def arrivals(self, rendezvous: int) -> tuple[Arrival, ...]:
        """Return the arrivals at a rendezvous so far."""
        # a member that died between its two requests leaves an empty slot
        texts = (
            self.get(f"rendezvous/{rendezvous}/{slot}")
            for slot in range(1, self.count(rendezvous) + 1)
        )
        found = [Arrival(**json.loads(text)) for text in texts if text is not None]
        return tuple(sorted(found, key=lambda r: r.member))

    def propose(self, decision: Decision) -> None:
        """Write a decision, unless its rendezvous has one."""
        self.first(f"decision/{decision.generation}", json.dumps(decision._asdict()))
        self._ask(self.store.set, "latest", str(decision.generation))

    def decision(self, generation: int) -> Decision | None:
        """Return the decision of a rendezvous; None if there is none yet."""
        if generation not in self._decisions:
            text = self.get(f"decision/{generation}")
            if text is None:
                return None
            fields = json.loads(text)
            for name in ("members", "holders", "former"):
                fields[name] = tuple(fields[name])
            self._decisions[generation] = Decision(**fields)
            self._decisions.pop(generation - 4, None)
        return self._decisions[generation]

    def source_of(self, generation: int) -> int:
        """Return the generation that the state of a decided one is from."""
        decision = self.decision(generation)
        assert decision is not None
        return decision.source

    def latest(self) -> int:
        """Return the last generation that was decided; 0 before the first."""
        generation = int(self.get("latest") or 0)
        # a proposer may have died between its two requests
        while self.decision(generation + 1) is not None:
            generation += 1
        return generation

    # -- signs of life ---------------------------------------------------------------------

    def beat(self, count: int) -> None:
        """Write a sign of life."""
        self._ask(self.store.set, f"beat/{self.number}", str(count))

    def signs(self, numbers: Sequence[int], rendezvous: int | None = None) -> Signs:
        """Return the signs of life of members, and whether a rendezvous has arrivals."""
        # one request for all, because each request wakes two processes; all requested keys exist:
        # the members have arrived, and `count` was called for the rendezvous
        keys = [f"beat/{n}" for n in numbers] + [f"left/{n}" for n in numbers]
        if rendezvous is not None:
            keys.append(f"rendezvous/{rendezvous}/count")
        found = dict(zip(keys, self._ask(self.store.multi_get, keys) if keys else (), strict=True))
        return Signs(
            {n: found[f"beat/{n}"] for n in numbers},
            frozenset(n for n in numbers if found[f"left/{n}"]),
            int(found.get(f"rendezvous/{rendezvous}/count", 0)) > 0,
        )

    def finish(self, generation: int) -> int:
        """Report that all steps are committed; return the generation of the first that did."""
        first = self.first("finished", str(generation))
        self.leave()
        return int(first)

    def leave(self) -> None:
        """Report that this member leaves the run."""
        self._ask(self.store.set, f"left/{self.number}", "left")

    def why_over(self) -> tuple[str, int]:
        """Return the message and the exit code for a process that comes after the run."""
        if not self._is_stranger:
            return (
                "the run's members are done, and this process was not among them at the end: it "
                "does not have the state; load the checkpoint that they saved",
                0,
            )
        return (
            f"the store has a run {self._name!r} that was done before this process came: nothing "
            "was trained here; for another training, serve a new store or pass join(name=...)",
            1,
        )

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._broken:  # a late answer would be taken for the answer to the next request
                raise DistError(self._broken)
            return request(*args)
        except DistError as error:
            self._broken = str(error)
            raise DistributedError(
                f"the store of the elastic run does not answer: {error}. Members can finish "
                "without it unless one is lost, and none can join: start all again from the last "
                "checkpoint, with a new store"
            ) from error


class Absent(NamedTuple):
    """Members that take no part."""

    gone: frozenset[int]  # all of them
    dead: frozenset[int]  # will not come back


class Monitor:
    """Signs of life of this member and of others."""

    def __init__(self, membership: Membership, silence: float) -> None:
        self._membership, self._silence = membership, silence
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._abort: Callable[[], None] | None = None
        self._moved_on: set[int] = set()  # members that had arrived at the next rendezvous
        self._end = threading.Event()
        self._looked = time.monotonic()
        # a member has arrived at the next rendezvous; why the generation has to end, or ""
        self.wanted, self.reason = False, ""
        self._thread = threading.Thread(target=self._run, name="gradwire-elastic", daemon=True)
        self._thread.start()

    def watch(self, generation: int, members: Iterable[int], abort: Callable[[], None]) -> None:
        """Call `abort` once if a member of the generation is lost or the generation has ended."""
        with contextlib.suppress(DistributedError):  # the store may die at any time
            self._membership.count(generation + 1)  # creates the key that `_look` reads
        with self._lock:
            self.wanted, self.reason = False, ""
            self._generation, self._members, self._abort = generation, tuple(members), abort
            self._seen = {n: seen for n, seen in self._seen.items() if n in self._members}
            self._moved_on = set()

    def ignore(self) -> None:
        """Stop watching a generation."""
        with self._lock:
            self._generation, self._members, self._abort = 0, (), None

    def absent(self, numbers: Iterable[int]) -> Absent:
        """Return the members among `numbers` that are dead, silent or done."""
        others = [n for n in numbers if n != self._membership.number]
        return self._judge(self._membership.signs(others))

    def _judge(self, signs: Signs) -> Absent:
        processes = {n: self._membership.process(n) for n in signs.beats}
        dead = signs.left | {n for n, q in processes.items() if q and not is_alive(q.process)}
        with self._lock:
            now = time.monotonic()
            if now - self._looked > self._silence / 2:  # this process itself was suspended
                self._seen = {n: (beat, now) for n, (beat, _) in self._seen.items()}
            self._looked = now
            for number, beat in signs.beats.items():
                if number not in self._seen or self._seen[number][0] != beat:
                    self._seen[number] = (beat, now)
            silent = {n for n in signs.beats if now - self._seen[n][1] > self._silence}
        return Absent(dead | silent, dead)

    def close(self) -> None:
        """End the thread."""
        self.ignore()
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_SECONDS + 1.0)

    def _run(self) -> None:
        count = 0
        while not self._end.wait(BEAT_SECONDS):
            count += 1
            try:
                self._membership.beat(count)
                self._look()
            except DistributedError:
                continue  # without the store nobody can join, but the generation continues

    def _look(self) -> None:
        with self._lock:
            generation, members = self._generation, self._members
        if not generation:
            return
        others = [n for n in members if n != self._membership.number]
        signs = self._membership.signs(others, generation + 1)
        with self._lock:
            self.wanted = self.wanted or (signs.wanted and self._generation == generation)
        if reason := self._reason_to_end(generation, others, signs):
            with self._lock:
                if self._generation != generation or self._abort is None:
                    return
                abort, self._abort, self.reason = self._abort, None, reason
            abort()

    def _reason_to_end(self, generation: int, others: Sequence[int], signs: Signs) -> str:
        """Return why the generation has to end; "" if it does not."""
        if signs.wanted:
            if self._membership.decision(generation + 1) is not None:
                return (
                    f"generation {generation + 1} was decided while this member was in {generation}"
                )
            before = self._moved_on
            arrived = {r.member for r in self._membership.arrivals(generation + 1)}
            self._moved_on = arrived.intersection(others)
            # a member that passed a barrier earlier than this one may be there for a moment
            if moved_on := before & self._moved_on:
                return f"members {sorted(moved_on)} have left the generation"
        if lost := self._judge(signs).gone - signs.left:
            return f"members {sorted(lost)} died or gave no sign of life"
        return ""
