"""Keys of a run in the store: arrivals, decisions, signs of life.

No member hosts the store. No request blocks: missing keys are polled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, Store

from gradwire._processes import namespace, this_process
from gradwire._version import __version__
from gradwire.elastic.members.environment import LAUNCH_VARIABLES
from gradwire.elastic.members.sockets import own_connection
from gradwire.elastic.protocol import Arrival, Decision
from gradwire.errors import DistributedError, NotSupportedError


@dataclass(frozen=True)
class Process:
    """Process of a member.

    Args:
        process: Identity of the process, from `this_process`.
        listener: Name under which other members of its host connect to it.
        network: Network namespace, which limits the reach of listeners' names.
    """

    process: str
    listener: str
    network: str

    @staticmethod
    def this(listener: str) -> Process:
        """Return the calling process."""
        return Process(this_process(), listener, namespace("net"))

    @property
    def host(self) -> str | None:
        """Host of the process with its namespaces; None if unknown."""
        host: str | None = json.loads(self.process)[0]
        return host and f"{host} {self.network}"


@dataclass(frozen=True)
class Signs:
    """Signs of life that members have written.

    Args:
        beats: Last sign of life of each member.
        left: Members that have left.
        wanted: True if a member has arrived at the requested rendezvous.
    """

    beats: dict[int, bytes]
    left: frozenset[int]
    wanted: bool


class Membership:
    """View of one member on the keys of its run.

    Args:
        store: The store, to which an own connection is made.
        seconds: Timeout of a request to the store.
        name: Prefix of the run's keys, the same on all members.
        listener: Name under which others of this host connect to this process; "" for none.

    Raises:
        NotSupportedError: This process is of another user than the other members on this host, or
            has another version of PyTorch or gradwire.

    Attributes:
        number: Number of this member.
        store: The store, with the prefix of the run.
    """

    def __init__(self, store: Store, seconds: float, name: str, listener: str) -> None:
        self._broken = ""
        own = self._ask(own_connection, store, seconds)
        self.store = PrefixStore(f"gradwire/elastic/{name}", own)
        self._processes: dict[int, Process] = {}
        self._decisions: dict[int, Decision] = {}
        mine = Process.this(listener)
        self._check_versions()
        if listener:
            self._check_user(mine.host)
        self._is_stranger, self._name = self._came_as_stranger(), name
        self.number = int(self._ask(self.store.add, "members", 1))
        self._ask(self.store.set, f"left/{self.number}", "")
        self._ask(self.store.set, f"beat/{self.number}", "0")
        self._ask(self.store.set, f"member/{self.number}", json.dumps(asdict(mine)))

    def _check_user(self, host: str | None) -> None:
        """Raise unless the members on this host, which share memory, are of one user."""
        mine = str(os.getuid()).encode()
        first = self._ask(self.store.compare_set, f"user/{host}", "", mine.decode())
        if first != mine:
            raise NotSupportedError(
                f"this process runs as user {mine.decode()}, and the other members on this host as "
                f"user {first.decode()}: start all as one user, or pass backend='gloo'"
            )

    def _check_versions(self) -> None:
        """Raise unless this process has the first member's versions of PyTorch and gradwire.

        Other versions may round or encode differently.
        """
        mine = f"torch {torch.__version__} and gradwire {__version__}"
        first = self._ask(self.store.compare_set, "versions", "", mine).decode()
        if first != mine:
            raise NotSupportedError(
                f"this process has {mine}, but the run was started with {first}: use the same "
                "versions, or start a new run from a checkpoint"
            )

    def _came_as_stranger(self) -> bool:
        """Return True if the run is done, and this launcher has started no member of it before."""
        launch = next(filter(None, map(os.environ.get, LAUNCH_VARIABLES)), None)
        key = f"launch/{launch}"
        if not self.any_finished():
            if launch:
                self._ask(self.store.set, key, "")
            return False
        return launch is None or not self._ask(self.store.check, [key])

    def process(self, number: int) -> Process | None:
        """Return the process of a member; None if it died before it wrote it."""
        found = self._processes.get(number)
        if found is None and (text := self._get(f"member/{number}")) is not None:
            found = self._processes[number] = Process(**json.loads(text))
        return found

    def forget_processes(self, but: Collection[int]) -> None:
        """Forget the processes of all members except `but`."""
        self._processes = {n: found for n, found in self._processes.items() if n in but}

    def agree_on(self, settings: str) -> str:
        """Return the settings of the first member that called this."""
        return str(self._ask(self.store.compare_set, "settings", "", settings).decode())

    def refuse(self, reason: str) -> None:
        """Make all members of the first rendezvous raise an error."""
        self._ask(self.store.compare_set, "refused", "", reason)

    def refusal(self) -> str | None:
        """Return the error that all members of the first rendezvous raise, or None."""
        text = self._get("refused")
        return None if text is None else text.decode()

    # -- rendezvous ------------------------------------------------------------------------

    def arrive(self, rendezvous: int, arrival: Arrival) -> None:
        """Arrive at a rendezvous; once per member."""
        slot = self._ask(self.store.add, f"rendezvous/{rendezvous}/count", 1)
        text = json.dumps(arrival._asdict())
        self._ask(self.store.set, f"rendezvous/{rendezvous}/{slot}", text)

    def is_open(self, rendezvous: int) -> bool:
        """Return True if a member has arrived at a rendezvous."""
        return self._count(rendezvous) > 0

    def _count(self, rendezvous: int) -> int:
        """Return the number of arrivals, creating the key if it is missing."""
        return int(self._ask(self.store.add, f"rendezvous/{rendezvous}/count", 0))

    def arrivals(self, rendezvous: int) -> tuple[Arrival, ...]:
        """Return the arrivals at a rendezvous so far."""
        # a member that died between its two requests leaves an empty slot
        texts = (
            self._get(f"rendezvous/{rendezvous}/{slot}")
            for slot in range(1, self._count(rendezvous) + 1)
        )
        found = [Arrival(**json.loads(text)) for text in texts if text is not None]
        return tuple(sorted(found, key=lambda r: r.member))

    def propose(self, decision: Decision) -> None:
        """Write a decision, unless its rendezvous has one."""
        key = f"decision/{decision.generation}"
        self._ask(self.store.compare_set, key, "", json.dumps(decision._asdict()))
        self._ask(self.store.set, "latest", str(decision.generation))

    def decision(self, generation: int) -> Decision | None:
        """Return the decision of a rendezvous; None if there is none yet."""
        if generation not in self._decisions:
            text = self._get(f"decision/{generation}")
            if text is None:
                return None
            fields = json.loads(text)
            for name in ("members", "holders", "former"):
                fields[name] = tuple(fields[name])
            self._decisions[generation] = Decision(**fields)
            self._decisions.pop(generation - 4, None)
        return self._decisions[generation]

    def latest(self) -> int:
        """Return the last generation that was decided; 0 before the first."""
        generation = int(self._get("latest") or 0)
        # a proposer may have died between its two requests
        while self.decision(generation + 1) is not None:
            generation += 1
        return generation

    # -- signs of life ---------------------------------------------------------------------

    def beat(self, count: int) -> None:
        """Write a sign of life."""
        self._ask(self.store.set, f"beat/{self.number}", str(count))

    def signs(self, numbers: Sequence[int], rendezvous: int | None = None) -> Signs:
        """Return the signs of life of members, and whether a rendezvous has arrivals.

        One request for all, because each request wakes two processes. All requested keys exist: the
        members have arrived, and `is_open` was called for the rendezvous.
        """
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
        """Report that this member has committed all steps.

        Returns:
            Generation of the first member that reported it.
        """
        first = int(self._ask(self.store.compare_set, "finished", "", str(generation)))
        self.leave()
        return first

    def leave(self) -> None:
        """Report that this member leaves the run."""
        self._ask(self.store.set, f"left/{self.number}", "left")

    def any_finished(self) -> bool:
        """Return True if any member has committed all steps."""
        return bool(self._ask(self.store.check, ["finished"]))

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

    def fail(self, reason: str) -> None:
        """Make all members raise an error instead of repeating the step."""
        self._ask(self.store.compare_set, "failed", "", reason)

    def failure(self) -> str | None:
        """Return the error that a member asked all to raise, or None."""
        text = self._get("failed")
        return None if text is None else text.decode()

    def _get(self, key: str) -> bytes | None:
        if not self._ask(self.store.check, [key]):
            return None
        return bytes(self._ask(self.store.get, key))

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
