"""The process group of an epoch: how it is formed, cut and left, apart from the default group.

On shm members connect by the names of their listeners; on Gloo through the store. What waits for a
member that will not come is ended: on shm by a message, on Gloo by shutting its connections down,
as Gloo itself waits on until its timeout.
"""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from gradwire._groups import destroy_in_thread, keep_store
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.elastic.members.sockets import (
    listening_port,
    own_connection,
    ports_of,
    shut_down,
    sockets,
)
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm.process_group import ShmProcessGroup
from gradwire.shm.register import is_available
from gradwire.shm.rendezvous import Listener, connect_by_name, report_absent
from gradwire.shm.sync import Deadline

FORM_SECONDS = 10.0
POLL_SECONDS = 0.01
LACKING = (errno.ENOMEM, errno.ENOSPC)
Result = TypeVar("Result")
Poll = Callable[[], None]
"""Called while a group is formed; raises if a member is lost."""


class _Gloo(NamedTuple):
    """A group over Gloo, and the inodes of its sockets by descriptor."""

    group: ProcessGroup
    sockets: dict[int, int]


class EpochGroup:
    """A process group, and what ends the waits on it.

    Args:
        group: The process group.
        store: For what its reducers tell each other.
        cut: Makes all its operations fail, here and on the others.
    """

    def __init__(self, group: ProcessGroup, store: Store, cut: Callable[[], None]) -> None:
        self.group: ProcessGroup | None = group
        self._cut: Callable[[], None] | None = cut
        self._lock = threading.Lock()
        keep_store(group, store)

    def abort(self) -> None:
        """Make all its operations fail; from any thread."""
        with self._lock:
            if self._cut is not None:
                self._cut()

    def leave(self, *, failed: bool) -> None:
        """Let go of it: in order, or after a failure at once."""
        if failed:
            self.abort()
        with self._lock:
            group, self.group, self._cut = self.group, None, None
        if group is not None:
            FaultDomain.forget(group)
            keep_store(group, None)
            if isinstance(group, ShmProcessGroup):
                group.shutdown()


def form_solo(timeout: timedelta, backend: str) -> EpochGroup:
    """A group of this process alone, before its first epoch."""
    store = dist.HashStore()
    if backend == "shm" and is_available():
        return _wrap_shm({}, 0, 1, store, timeout, "solo")
    group = _gloo(store, 0, 1, timeout, "solo")
    return EpochGroup(group, store, lambda: None)


def form_shm(
    listener: Listener,
    names: Sequence[str],
    rank: int,
    epoch: int,
    store: Store,
    timeout: timedelta,
    poll: Poll,
) -> EpochGroup:
    """Form a group in shared memory.

    Args:
        listener: This process's.
        names: Of all members' listeners, in the order of their ranks.
        rank: This member's.
        epoch: The group's, of which there is one.
        store: For what its reducers tell each other.
        timeout: For each operation.
        poll: Called meanwhile.

    Raises:
        DistributedError: A member is lost; what `poll` raises.
    """
    formed = _in_thread(
        lambda: connect_by_name(listener, names, rank, epoch, Deadline(FORM_SECONDS)),
        poll,
        lambda: report_absent(listener, names, epoch, rank),
    )
    return _wrap_shm(formed, rank, len(names), store, timeout, f"elastic {epoch}")


def _wrap_shm(
    peers: dict[int, socket.socket],
    rank: int,
    size: int,
    store: Store,
    timeout: timedelta,
    name: str,
) -> EpochGroup:
    group = ShmProcessGroup(rank, size, peers, timeout)
    group.setGroupName(name)
    return EpochGroup(group, store, group.abort)


def form_gloo(
    rank: int, size: int, epoch: int, store: Store, timeout: timedelta, poll: Poll
) -> EpochGroup:
    """Form a group over Gloo; arguments as `form_shm` has them.

    Raises:
        DistributedError: A member is lost; what `poll` raises.
    """
    name = f"elastic {epoch}"
    # a connection of its own: Gloo's requests wait in the store's client
    own = PrefixStore(name, own_connection(store, FORM_SECONDS))
    own.set_timeout(timedelta(seconds=FORM_SECONDS))
    _meet(own, rank, size, poll)
    before = sockets()

    def form() -> _Gloo:
        group = _gloo(own, rank, size, timeout, name)
        return _Gloo(group, _gloo_sockets(before, own, rank, size))

    formed = _in_thread(form, poll, lambda: None)
    connections = formed.sockets
    return EpochGroup(formed.group, PrefixStore(name, store), lambda: shut_down(connections))


def _meet(store: Store, rank: int, size: int, poll: Poll) -> None:
    """Wait until all members are about to form the group: Gloo's own wait cannot be ended."""
    store.set(f"here/{rank}", "")
    deadline = Deadline(FORM_SECONDS)
    while not store.check([f"here/{other}" for other in range(size)]):
        poll()
        if deadline.over():
            raise CollectiveTimeoutError(f"members did not come within {FORM_SECONDS:g} s")
        time.sleep(POLL_SECONDS / 4)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> ProcessGroup:
    # Gloo waits five times its timeout for a connection, and nothing ends that wait
    limit = timedelta(seconds=FORM_SECONDS / 5)
    backend = dist.ProcessGroupGloo(store, rank, size, limit)
    backend._set_default_timeout(timeout)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    if size > 1:
        destroy_in_thread(group, backend)
    named: Any = group  # its stub has a type of its own for names
    named._set_group_name(name)
    group._set_group_desc("")
    return group


def _in_thread(form: Callable[[], Result], poll: Poll, end: Callable[[], None]) -> Result:
    """The result of a function that waits for others, unless `poll` raises meanwhile."""
    future: Future[Result] = Future()
    threading.Thread(
        target=_run, args=(future, form), name="gradwire-elastic-form", daemon=True
    ).start()
    deadline = Deadline(FORM_SECONDS)
    try:
        while not future.done():
            wait([future], POLL_SECONDS)
            poll()
            if deadline.over():
                raise CollectiveTimeoutError(f"members did not connect within {FORM_SECONDS:g} s")
    except BaseException:
        future.add_done_callback(_close)
        end()
        raise
    try:
        return future.result()
    except DistributedError:
        raise
    except Exception as error:
        _check_own_fault(error)
        raise PeerLostError(f"the group could not be formed: {error}") from error
    finally:
        # the error's traceback holds this frame: they would keep each other until garbage is
        # collected, and a connection to the store with them
        del future


def _check_own_fault(error: Exception) -> None:
    """Raise if this process lacks the memory or descriptors for a group: no other member helps."""
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) in LACKING:
        raise DistributedError(f"this process has no memory for a group: {error}") from error
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        for _ in range(8):
            pairs.append(socket.socketpair())
    except OSError as error:
        raise DistributedError(f"this process cannot open connections: {error}") from error
    finally:
        for end in itertools.chain(*pairs):
            end.close()


def _run(future: Future[Result], form: Callable[[], Result]) -> None:
    try:
        future.set_result(form())
    except BaseException as error:  # raised by who waits
        future.set_exception(error)
        del future  # as above


def _close(future: Future[Any]) -> None:
    """Let go of a group that came too late."""
    if future.exception() is not None:
        return
    value = future.result()
    if isinstance(value, dict):
        for connection in value.values():
            connection.close()
    elif isinstance(value, _Gloo):
        shut_down(value.sockets)


def _gloo_sockets(before: dict[int, int], store: Store, rank: int, size: int) -> dict[int, int]:
    """The connections of a group that was just formed.

    Of the sockets that are new, those that lead from or to one of the members' listening ports:
    another thread of this process may have opened others.
    """
    new = {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}
    ports = [port for fd in new if (port := listening_port(fd))]
    store.set(f"ports/{rank}", " ".join(map(str, ports)))
    texts = store.multi_get([f"ports/{other}" for other in range(size)])
    known = {int(port) for text in texts for port in text.split()}
    return {fd: inode for fd, inode in new.items() if ports_of(fd) & known}
