"""Forms the groups of epochs: on which backend, until when, and who gives up where none can be."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from weakref import WeakSet

from gradwire.elastic.members.groups import EpochGroup, form_gloo, form_shm, form_solo
from gradwire.elastic.members.membership import Membership
from gradwire.elastic.members.monitor import Monitor
from gradwire.elastic.members.waiting import means_a_loss
from gradwire.elastic.protocol import Decision
from gradwire.errors import DistributedError, PeerLostError
from gradwire.shm.register import is_available
from gradwire.shm.rendezvous import Listener


def make_listener(backend: str) -> Listener | None:
    """What members of this host connect to; None where they do not share memory."""
    return Listener() if backend == "shm" and is_available() else None


class Forming:
    """Forms groups for one member.

    Args:
        membership: The store.
        monitor: Signs of life.
        listener: What other members of this host connect to; `close` closes it.
        backend: "shm", or "gloo" for all groups.
        timeout: Of a group's operations, in seconds.
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
        self._unformed: tuple[frozenset[int], float] | None = None  # who cannot, and since when
        _ALL.add(self)

    def solo(self) -> EpochGroup:
        """A group of this process alone."""
        return form_solo(self._timeout, self._backend)

    def form(self, decision: Decision, rank: int) -> EpochGroup:
        """Form the group of an epoch.

        Raises:
            PeerLostError, CollectiveTimeoutError: A member was lost, or it failed for another
                reason: the next round decides.
            DistributedError: It has failed for so long that this member gives up.
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
        """Close the listener: a forked child, too, would keep its name after the process."""
        if self._listener is not None:
            self._listener.close()

    def _form(self, decision: Decision, rank: int) -> EpochGroup:
        if len(decision.members) == 1:
            return self.solo()
        processes = [self._membership.process(number) for number in decision.members]
        store, found = self._membership.store, [q for q in processes if q is not None]
        if len(found) < len(processes):
            raise PeerLostError("a member died before it was known")

        def poll() -> None:
            self._check(decision)

        epoch, hosts = decision.epoch, {q.host for q in found}
        if self._listener is not None and len(hosts) == 1 and None not in hosts:
            names = [q.listener for q in found]
            if all(names):
                return form_shm(self._listener, names, rank, epoch, store, self._timeout, poll)
        return form_gloo(rank, len(found), epoch, store, self._timeout, poll)

    def _check(self, decision: Decision) -> None:
        """Raise if the epoch is not to be."""
        after = decision.epoch + 1
        if self._membership.decision(after) is not None:
            raise PeerLostError(f"epoch {decision.epoch} is over")
        registered = {r.member for r in self._membership.registered(after)}
        if gave_up := registered.intersection(decision.members):  # who is new can wait
            raise PeerLostError(f"members {sorted(gave_up)} have given the epoch up")
        if gone := self._monitor.absent(decision.members).gone:
            raise PeerLostError(f"members {sorted(gone)} are gone")

    def _give_up(self, decision: Decision, rank: int, error: DistributedError) -> None:
        """Raise if these members could not form a group for long: the one of the last rank first.

        Who is at fault cannot be known, but one fewer may be able to.
        """
        members, now = frozenset(decision.members), time.monotonic()
        if self._unformed is None or self._unformed[0] != members:
            self._unformed = members, now
        patience = self._timeout.total_seconds() * (len(members) - rank)
        if now - self._unformed[1] > patience:
            raise DistributedError(
                f"no group could be formed for {patience:g} s; the last error: {error}"
            ) from error


_ALL: WeakSet[Forming] = WeakSet()


def _in_child() -> None:
    for forming in list(_ALL):
        forming.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
