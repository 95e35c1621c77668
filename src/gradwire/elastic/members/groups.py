"""Process group of a generation: form it, abort it and leave it, apart from the default group.

On shm, members connect by the names of their listeners; on Gloo, through the store. A wait for a
member that does not come is ended: on shm by a message, on Gloo by shutting down its connections,
because Gloo itself waits until its timeout.
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
from gradwire._processes import Deadline
from gradwire.ddp import FaultDomain
from gradwire.elastic.members.sockets import (
    listening_port,
    own_connection,
    ports_of,
    shut_down,
    sockets,
)
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm import (
    Listener,
    ShmProcessGroup,
    connect_by_name,
    is_available,
    join,
    report_absent,
)

FORM_SECONDS = 10.0
POLL_SECONDS = 0.01
LACKING = (errno.ENOMEM, errno.ENOSPC)
Result = TypeVar("Result")
Poll = Callable[[], None]
"""Called while a group is formed; raises if a member is lost."""


class _Gloo(NamedTuple):
    """Gloo group, and the inodes of its sockets by descriptor."""

    group: ProcessGroup
    sockets: dict[int, int]


class GenerationGroup:
    """Process group, and the means to end the waits on it.

    Args:
        group: The process group.
        store: Store through which reducers of the group communicate.
        cut: Function that makes all operations of the group fail, on all its members.
    """

    def __init__(self, group: ProcessGroup, store: Store, cut: Callable[[], None]) -> None:
        self.group: ProcessGroup | None = group
        self._cut: Callable[[], None] | None = cut
        self._lock = threading.Lock()
        keep_store(group, store)

    def abort(self) -> None:
        """Make all operations of the group fail; may be called from any thread."""
        with self._lock:
            if self._cut is not None:
                self._cut()

    def leave(self, *, failed: bool) -> None:
        """Release the group; abort it first if it failed."""
        if failed:
            self.abort()
        with self._lock:
            group, self.group, self._cut = self.group, None, None
        if group is not None:
            FaultDomain.forget(group)
            keep_store(group, None)
            if isinstance(group, ShmProcessGroup):
                group.shutdown()


def form_solo(timeout: timedelta, backend: str) -> GenerationGroup:
    """Return a group of this process alone, for the time before its first generation."""
    store = dist.HashStore()
    if backend == "shm" and is_available():
        return _wrap_shm({}, 0, 1, store, timeout, "solo")
    group = _gloo(store, 0, 1, timeout, "solo")
    return GenerationGroup(group, store, lambda: None)


def form_shm(
    listener: Listener,
    names: Sequence[str],
    rank: int,
    generation: int,
    store: Store,
    timeout: timedelta,
    poll: Poll,
) -> GenerationGroup:
    """Form a group in shared memory.

    Args:
        listener: Listener of this process.
        names: Names of all members' listeners, in the order of their ranks.
        rank: Rank of this member.
        generation: Number of the generation, unique to the group.
        store: Store through which reducers of the group communicate.
        timeout: Timeout of each operation.
        poll: Function called while waiting; raises if a member is lost.

    Raises:
        DistributedError: A member is lost, or `poll` raised.
    """
    formed = _in_thread(
        lambda: connect_by_name(listener, names, rank, generation, Deadline(FORM_SECONDS)),
        poll,
        lambda: report_absent(listener, names, generation, rank),
    )
    return _wrap_shm(formed, rank, len(names), store, timeout, f"elastic {generation}")


def _wrap_shm(
    peers: dict[int, socket.socket],
    rank: int,
    size: int,
    store: Store,
    timeout: timedelta,
    name: str,
) -> GenerationGroup:
    group = ShmProcessGroup(join(rank, peers, timeout.total_seconds()))
    group.setGroupName(name)
    return GenerationGroup(group, store, group.abort)


def form_gloo(
    rank: int, size: int, generation: int, store: Store, timeout: timedelta, poll: Poll
) -> GenerationGroup:
    """Form a group over Gloo; arguments as for `form_shm`.

    Raises:
        DistributedError: A member is lost, or `poll` raised.
    """
    name = f"elastic {generation}"
    # own connection: Gloo's blocking requests would block the shared client
    own = PrefixStore(name, own_connection(store, FORM_SECONDS))
    own.set_timeout(timedelta(seconds=FORM_SECONDS))
    _meet(own, rank, size, poll)
    before = sockets()

    def form() -> _Gloo:
        group = _gloo(own, rank, size, timeout, name)
        return _Gloo(group, _gloo_sockets(before, own, rank, size))

    formed = _in_thread(form, poll, lambda: None)
    connections = formed.sockets
    return GenerationGroup(formed.group, PrefixStore(name, store), lambda: shut_down(connections))


def _meet(store: Store, rank: int, size: int, poll: Poll) -> None:
    """Wait until all members are about to form the group.

    Gloo's own wait cannot be ended.
    """
    store.set(f"here/{rank}", "")
    deadline = Deadline(FORM_SECONDS)
    while not store.check([f"here/{other}" for other in range(size)]):
        poll()
        if deadline.over():
            raise CollectiveTimeoutError(f"not all members came within {FORM_SECONDS:g} s")
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
    named: Any = group  # the stub declares another type for names
    named._set_group_name(name)
    group._set_group_desc("")
    return group


def _in_thread(form: Callable[[], Result], poll: Poll, end: Callable[[], None]) -> Result:
    """Return the result of `form`, run in a thread; call `end` and raise if `poll` raises."""
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
                raise CollectiveTimeoutError(f"not all members connected within {FORM_SECONDS:g} s")
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
        # the error's traceback refers to this frame: the cycle would keep a connection to the
        # store open until the next garbage collection
        del future


def _check_own_fault(error: Exception) -> None:
    """Raise if this process lacks memory or descriptors for a group.

    Other members cannot help in this case.
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) in LACKING:
        raise DistributedError(f"this process lacks memory for a group: {error}") from error
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
    except BaseException as error:  # raised in the waiting thread
        future.set_exception(error)
        del future  # as above


def _close(future: Future[Any]) -> None:
    """Release a group that was formed too late."""
    if future.exception() is not None:
        return
    value = future.result()
    if isinstance(value, dict):
        for connection in value.values():
            connection.close()
    elif isinstance(value, _Gloo):
        shut_down(value.sockets)


def _gloo_sockets(before: dict[int, int], store: Store, rank: int, size: int) -> dict[int, int]:
    """Return the connections of a group that was just formed.

    Of the new sockets, these are the connections from or to a listening port of a member: another
    thread of this process may have opened other sockets.
    """
    new = {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}
    ports = [port for fd in new if (port := listening_port(fd))]
    store.set(f"ports/{rank}", " ".join(map(str, ports)))
    texts = store.multi_get([f"ports/{other}" for other in range(size)])
    known = {int(port) for text in texts for port in text.split()}
    return {fd: inode for fd, inode in new.items() if ports_of(fd) & known}
