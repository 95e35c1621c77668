"""What members write to the store and read there: registrations, decisions, signs of life.

The store is one that no member hosts. No request waits: what is not there yet is asked for again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, Store

from gradwire._version import __version__
from gradwire.ddp.faults.liveness import this_process
from gradwire.elastic.members.environment import LAUNCH_VARIABLES
from gradwire.elastic.members.sockets import own_connection
from gradwire.elastic.protocol import Decision, Registration
from gradwire.errors import DistributedError, NotSupportedError


@dataclass(frozen=True)
class Process:
    """Where a member runs.

    Args:
        process: As `liveness.this_process` has it.
        listener: The name under which others of its host connect to it.
        network: Its network namespace: listeners' names do not leave it.
    """

    process: str
    listener: str
    network: str

    @staticmethod
    def this(listener: str) -> Process:
        """The process that calls."""
        try:
            network = os.readlink("/proc/self/ns/net")
        except OSError:
            network = ""
        return Process(this_process(), listener, network)

    @property
    def host(self) -> str | None:
        """Its host, with its namespaces; None where that is not known."""
        host: str | None = json.loads(self.process)[0]
        return host and f"{host} {self.network}"


@dataclass(frozen=True)
class Signs:
    """What members show of themselves.

    Args:
        beats: The last sign of life of each.
        left: Those that take part no more.
        wanted: Whether anybody has registered for the round that was asked about.
    """

    beats: dict[int, bytes]
    left: frozenset[int]
    wanted: bool


class Membership:
    """One member's view of the store.

    Args:
        store: The store; a connection of its own is made.
        seconds: How long the store may take to answer a request.
        name: What this run's keys begin with: the same on all members.
        listener: The name under which others of this host connect to this process; "" if none do.

    Raises:
        NotSupportedError: It is another user's than the run's others on this host, or has another
            version of PyTorch or gradwire.

    Attributes:
        number: This member's.
        store: The store, under the run's name.
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
        """Members that share memory are processes of one user: the first one of a host."""
        mine = str(os.getuid()).encode()
        first = self._ask(self.store.compare_set, f"user/{host}", "", mine.decode())
        if first != mine:
            raise NotSupportedError(
                f"this process is user {mine.decode()}'s, and the run's others on this host are "
                f"user {first.decode()}'s: start all as one user, or pass backend='gloo'"
            )

    def _check_versions(self) -> None:
        """Members have the first one's versions: others round or write otherwise."""
        mine = f"torch {torch.__version__} and gradwire {__version__}"
        first = self._ask(self.store.compare_set, "versions", "", mine).decode()
        if first != mine:
            raise NotSupportedError(
                f"this process has {mine}, and the run was begun with {first}: start all with the "
                "same, or begin another run from a checkpoint"
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
        """Where a member runs; None if it died before it wrote that."""
        found = self._processes.get(number)
        if found is None and (text := self._get(f"member/{number}")) is not None:
            found = self._processes[number] = Process(**json.loads(text))
        return found

    def forget_processes(self, but: Collection[int]) -> None:
        """Forget what was read of members that are gone."""
        self._processes = {n: found for n, found in self._processes.items() if n in but}

    def agree_on(self, settings: str) -> str:
        """The settings of the first member that asks."""
        return str(self._ask(self.store.compare_set, "settings", "", settings).decode())

    def refuse(self, reason: str) -> None:
        """Have all members of the first round raise an error."""
        self._ask(self.store.compare_set, "refused", "", reason)

    def refusal(self) -> str | None:
        """The error that all members of the first round raise, if there is one."""
        text = self._get("refused")
        return None if text is None else text.decode()

    # -- rounds ----------------------------------------------------------------------------

    def register(self, round_: int, registration: Registration) -> None:
        """Register for a round, once."""
        slot = self._ask(self.store.add, f"round/{round_}/count", 1)
        text = json.dumps(registration._asdict())
        self._ask(self.store.set, f"round/{round_}/{slot}", text)

    def is_open(self, round_: int) -> bool:
        """Whether anybody has registered for a round."""
        return self._count(round_) > 0

    def _count(self, round_: int) -> int:
        """How many have registered; there is a number in the store from now on."""
        return int(self._ask(self.store.add, f"round/{round_}/count", 0))

    def registered(self, round_: int) -> tuple[Registration, ...]:
        """Who has registered for a round so far."""
        # a member that died between its two requests has a slot with nothing in it
        texts = (self._get(f"round/{round_}/{slot}") for slot in range(1, self._count(round_) + 1))
        found = [Registration(**json.loads(text)) for text in texts if text is not None]
        return tuple(sorted(found, key=lambda r: r.member))

    def propose(self, decision: Decision) -> None:
        """Write a decision, if there is none for its round."""
        key = f"decision/{decision.epoch}"
        self._ask(self.store.compare_set, key, "", json.dumps(decision._asdict()))
        self._ask(self.store.set, "latest", str(decision.epoch))

    def decision(self, epoch: int) -> Decision | None:
        """The decision of a round, if there is one."""
        if epoch not in self._decisions:
            text = self._get(f"decision/{epoch}")
            if text is None:
                return None
            fields = json.loads(text)
            for name in ("members", "holders", "former"):
                fields[name] = tuple(fields[name])
            self._decisions[epoch] = Decision(**fields)
            self._decisions.pop(epoch - 4, None)
        return self._decisions[epoch]

    def latest(self) -> int:
        """The last epoch that was decided; 0 before the first."""
        epoch = int(self._get("latest") or 0)
        while self.decision(epoch + 1) is not None:  # its proposer may have died in between
            epoch += 1
        return epoch

    # -- signs of life ---------------------------------------------------------------------

    def beat(self, count: int) -> None:
        """Show that this process runs."""
        self._ask(self.store.set, f"beat/{self.number}", str(count))

    def signs(self, numbers: Sequence[int], round_: int | None = None) -> Signs:
        """What members show of themselves, and whether anybody has registered for a round.

        In one request, as each takes two processes from their work. All that it asks for is there:
        the members have registered, and `is_open` was asked about the round.
        """
        keys = [f"beat/{n}" for n in numbers] + [f"left/{n}" for n in numbers]
        if round_ is not None:
            keys.append(f"round/{round_}/count")
        found = dict(zip(keys, self._ask(self.store.multi_get, keys) if keys else (), strict=True))
        return Signs(
            {n: found[f"beat/{n}"] for n in numbers},
            frozenset(n for n in numbers if found[f"left/{n}"]),
            int(found.get(f"round/{round_}/count", 0)) > 0,
        )

    def finish(self, epoch: int) -> int:
        """Let others know that this member has committed all steps.

        Returns:
            The epoch of the first member that had.
        """
        first = int(self._ask(self.store.compare_set, "finished", "", str(epoch)))
        self.leave()
        return first

    def leave(self) -> None:
        """Let others know that this member takes part no more."""
        self._ask(self.store.set, f"left/{self.number}", "left")

    def any_finished(self) -> bool:
        """Whether any member has committed all steps."""
        return bool(self._ask(self.store.check, ["finished"]))

    def why_over(self) -> tuple[str, int]:
        """Return what a process is told that the run is over for, and its exit code."""
        if not self._is_stranger:
            return (
                "the run's members are done, and this process was not taken in before, or was left "
                "out: it does not have the state; load the checkpoint that they have saved",
                0,
            )
        return (
            f"the store has a run {self._name!r} that was done before this process came: nothing "
            "was trained here; for another training, serve a new store or pass join(name=...)",
            1,
        )

    def fail(self, reason: str) -> None:
        """Have all members raise an error, instead of trying the step again."""
        self._ask(self.store.compare_set, "failed", "", reason)

    def failure(self) -> str | None:
        """The error that a member wants all to raise, if one does."""
        text = self._get("failed")
        return None if text is None else text.decode()

    def _get(self, key: str) -> bytes | None:
        if not self._ask(self.store.check, [key]):
            return None
        return bytes(self._ask(self.store.get, key))

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._broken:  # a late answer would be taken for that of the next request
                raise DistError(self._broken)
            return request(*args)
        except DistError as error:
            self._broken = str(error)
            raise DistributedError(
                f"the store of the elastic run does not answer: {error}; members can finish "
                "without it as long as none is lost, and none can join: start all again with a "
                "new store, from the last checkpoint"
            ) from error
