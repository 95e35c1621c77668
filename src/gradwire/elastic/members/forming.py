"""Form the groups of generations: choose the backend, watch for losses, give up in the end."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from weakref import WeakSet

from gradwire.elastic.members.groups import GenerationGroup, form_gloo, form_shm, form_solo
from gradwire.elastic.members.membership import Membership
from gradwire.elastic.members.monitor import Monitor
from gradwire.elastic.members.waiting import means_a_loss
from gradwire.elastic.protocol import Decision
from gradwire.errors import DistributedError, PeerLostError
from gradwire.shm import Listener, is_available


def make_listener(backend: str) -> Listener | None:
    """Return the listener that members of this host connect to; None without shared memory."""
    return Listener() if backend == "shm" and is_available() else None


class Forming:
    """Forms groups for one member.

    Args:
        membership: Keys of the run in the store.
        monitor: Signs of life.
        listener: Listener that other members of this host connect to; `close` closes it.
        backend: "shm", or "gloo" for all groups.
        timeout: Timeout of a group's operations in seconds.
    """

    def __init__(
        self,
        membership: Membership,
        monitor: Monitor,
        listener: Listener | None,
        backend: str,
        timeout: float,
    ) -> None:
        self._membership, self._monitor, self._listener = membership, monitor, listener
        self._backend, self._timeout = backend, timedelta(seconds=timeout)
        # members that failed, and since when
        self._unformed: tuple[frozenset[int], float] | None = None
        _ALL.add(self)

    def solo(self) -> GenerationGroup:
        """Return a group of this process alone."""
        return form_solo(self._timeout, self._backend)

    def form(self, decision: Decision, rank: int) -> GenerationGroup:
        """Form the group of a generation.

        Raises:
            PeerLostError, CollectiveTimeoutError: A member was lost, or forming failed for another
                reason: the next rendezvous decides.
            DistributedError: Forming has failed for so long that this member gives up.
        """
        try:
            group = self._form(decision, rank)
        except DistributedError as error:
            if means_a_loss(error):
                self._give_up(decision, rank, error)
            raise
        self._unformed = None
        return group

    def close(self) -> None:
        """Close the listener, whose name a forked child would otherwise keep alive."""
        if self._listener is not None:
            self._listener.close()

    def _form(self, decision: Decision, rank: int) -> GenerationGroup:
        if len(decision.members) == 1:
            return self.solo()
        processes = [self._membership.process(number) for number in decision.members]
        store, found = self._membership.store, [q for q in processes if q is not None]
        if len(found) < len(processes):
            raise PeerLostError("a member died before it wrote its process to the store")

        def poll() -> None:
            self._check(decision)

        generation, hosts = decision.generation, {q.host for q in found}
        if self._listener is not None and len(hosts) == 1 and None not in hosts:
            names = [q.listener for q in found]
            if all(names):
                return form_shm(self._listener, names, rank, generation, store, self._timeout, poll)
        return form_gloo(rank, len(found), generation, store, self._timeout, poll)

    def _check(self, decision: Decision) -> None:
        """Raise if the group of the generation will not be formed."""
        after = decision.generation + 1
        if self._membership.decision(after) is not None:
            raise PeerLostError(f"generation {decision.generation} has ended")
        arrived = {r.member for r in self._membership.arrivals(after)}
        if gave_up := arrived.intersection(decision.members):  # newcomers can wait
            raise PeerLostError(f"members {sorted(gave_up)} have left the generation")
        if gone := self._monitor.absent(decision.members).gone:
            raise PeerLostError(f"members {sorted(gone)} are gone")

    def _give_up(self, decision: Decision, rank: int, error: DistributedError) -> None:
        """Raise if these members could not form a group for long; the last rank raises first.

        The faulty member cannot be known, but one member fewer may succeed.
        """
        members, now = frozenset(decision.members), time.monotonic()
        if self._unformed is None or self._unformed[0] != members:
            self._unformed = members, now
        patience = self._timeout.total_seconds() * (len(members) - rank)
        if now - self._unformed[1] > patience:
            raise DistributedError(
                f"no group could be formed within {patience:g} s: {error}"
            ) from error


_ALL: WeakSet[Forming] = WeakSet()


def _in_child() -> None:
    for forming in list(_ALL):
        forming.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
