"""Process group and backend classes of a group over several hosts.

The forms of the operations, their checks and their queue are those of groups on one host. The
algorithms that move the data differ, and messages between ranks go through the engine.
"""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,misc,assignment"

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._processes import Deadline
from gradwire._torch import outside_graphs
from gradwire.errors import ArgumentError, DistributedError
from gradwire.shm.group.process_group import Operations, ShmBackend, ShmProcessGroup
from gradwire.shm.hierarchy.algorithms import AcrossHosts
from gradwire.shm.hierarchy.context import Context
from gradwire.shm.hierarchy.engine import USER_TAGS, Transfer
from gradwire.shm.memory.tensors import check_results, check_tensors, flat_of, only, write_back
from gradwire.shm.runtime.operation_queue import Queue
from gradwire.shm.runtime.work import ShmWork

_MAX_TAG = 2**30


class _ThreadQueue(Queue):
    """Queue that runs all operations in its thread: signals do not end the engine's waits."""

    def enter(self) -> bool:
        """Return False: no operation runs in the caller's thread."""
        return False


@outside_graphs
class AcrossHostsOperations(Operations):
    """Operations of a group over several hosts."""

    def _join(self, rank: int, size: int, peers: Any, deadline: Deadline) -> None:
        """Join with a context, which the constructors pass on as `peers`."""
        context: Context = peers
        self._rank, self._size = rank, size
        self._incoming, self._outgoing = {}, {}
        self._context = self._state = context
        self._algorithms = AcrossHosts(context)
        self._queue = _ThreadQueue(f"gradwire-hosts-{rank}")
        self._broken, self._closed = None, ""

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share memory with each other."""
        return self._context.teams.ranks

    def _fail_receives(self, error: DistributedError) -> None:
        self._context.transport.cut()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor, which must not change until the handle was waited for."""
        self.check_usable()
        self._check_peer(dst, "dst")
        check_tensors(tensors)
        flat = flat_of(only(tensors))
        return self._started(
            self._context.transport.send(flat, dst, _on_engine(tag)), tensors, None
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from rank `src`."""
        self.check_usable()
        self._check_peer(src, "src")
        check_results(tensors)
        flat = flat_of(only(tensors))
        return self._started(
            self._context.transport.receive(flat, src, _on_engine(tag)), tensors, flat
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from any rank."""
        self.check_usable()
        check_results(tensors)
        flat = flat_of(only(tensors))
        return self._started(
            self._context.transport.receive_from_any(flat, _on_engine(tag)), tensors, flat
        )

    def _started(self, transfer: Transfer, tensors: list[Tensor], flat: Tensor | None) -> Work:
        return _TransferWork(self, transfer, tensors, flat)


class _TransferWork(ShmWork):
    """Handle of a message, completed by the thread that waits for it."""

    def __init__(
        self,
        group: AcrossHostsOperations,
        transfer: Transfer,
        tensors: Sequence[Tensor],
        flat: Tensor | None,
    ) -> None:
        super().__init__(tensors, group.timeout.total_seconds(), callbacks_in_own_thread=True)
        self._group, self._transfer, self._flat = group, transfer, flat
        self._completing, self._has_thread = threading.Lock(), False

    def is_completed(self) -> bool:
        """Return True if the message has arrived, or was sent, even if no thread waits for it."""
        # engines such as Gloo complete a receive only in a wait
        if not self._done:
            self._complete_in_thread()
        return super().is_completed()

    def _complete_in_thread(self) -> None:
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._wait, args=(self._default_timeout,), daemon=True).start()

    def _wait(self, seconds: float | None) -> bool:
        if not self._completing.acquire(timeout=-1 if seconds is None else seconds):
            return False
        try:
            if not self._done:
                self._complete(seconds)
        finally:
            self._completing.release()
        return True

    def _complete(self, seconds: float | None) -> None:
        source = -1
        try:
            self._transfer.wait(Deadline(seconds))
            if self._flat is not None:
                write_back(self._tensors[0], self._flat)
                source = self._transfer.source()
        except BaseException as error:
            self._group._break(error)  # the engine's connections do not survive it
            self.finish(error)
        else:
            self.finish(source=source)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors."""
        future = super().get_future()
        if not self._done:
            self._complete_in_thread()
        return future


def _on_engine(tag: int) -> int:
    """Return a caller's tag on the engine, beside those of collectives."""
    if not isinstance(tag, int) or not 0 <= tag < _MAX_TAG:
        raise ArgumentError(f"tag is {tag!r}: between hosts, give an int from 0 to {_MAX_TAG - 1}")
    return tag + USER_TAGS


class AcrossHostsProcessGroup(AcrossHostsOperations, ShmProcessGroup):
    """Process group of the ranks of several hosts; arguments as for `ShmProcessGroup`."""


class AcrossHostsBackend(AcrossHostsOperations, ShmBackend):
    """Backend of the ranks of several hosts; arguments as for `ShmBackend`."""
