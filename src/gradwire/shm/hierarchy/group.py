"""Group over several hosts: its messages go through the engine.

The operations, their checks and their queue are those of groups on one host. The state that moves
their data differs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._processes import Deadline
from gradwire.errors import ArgumentError, DistributedError
from gradwire.shm.group.group import Group, check_peer
from gradwire.shm.hierarchy.algorithms import AcrossHosts
from gradwire.shm.hierarchy.engine import USER_TAGS, Transfer, Transport
from gradwire.shm.memory.tensors import check_results, check_tensors, flat_of, only, write_back
from gradwire.shm.runtime.operation_queue import Queue
from gradwire.shm.runtime.work import ShmWork

_MAX_TAG = 2**30


class _ThreadQueue(Queue):
    """Queue that runs all operations in its thread: signals do not end the engine's waits."""

    def enter(self) -> bool:
        """Return False: no operation runs in the caller's thread."""
        return False


def join(state: AcrossHosts, seconds: float) -> Group:
    """Return a group over several hosts, whose ranks are connected."""
    messages, queue = EngineMessages(state.transport), _ThreadQueue(f"gradwire-hosts-{state.rank}")
    teams = state.teams.ranks
    return Group(state.rank, state.size, state, messages, queue, seconds, teams=teams)


class EngineMessages:
    """Messages of a group through the engine between hosts, also within a host."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, group: Group, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send a tensor, which must not change until the handle was waited for."""
        group.check_usable()
        check_peer(group, dst, "dst")
        check_tensors(tensors)
        flat = flat_of(only(tensors))
        transfer = self._transport.send(flat, dst, _on_engine(tag))
        return _TransferWork(group, transfer, tensors, None)

    def receive(self, group: Group, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        """Fill a tensor with the next message of a tag; from any rank if `src` is None."""
        group.check_usable()
        if src is not None:
            check_peer(group, src, "src")
        check_results(tensors)
        flat = flat_of(only(tensors))
        transfer = self._transport.receive(flat, src, _on_engine(tag))
        return _TransferWork(group, transfer, tensors, flat)

    def fail_all(self, error: DistributedError) -> None:
        """End the connections, and so all pending receives."""
        self._transport.cut()

    def close(self) -> None:
        """Do nothing: the state closes the transport."""


class _TransferWork(ShmWork):
    """Handle of a message, completed by the thread that waits for it."""

    def __init__(
        self, group: Group, transfer: Transfer, tensors: Sequence[Tensor], flat: Tensor | None
    ) -> None:
        super().__init__(tensors, group.seconds, callbacks_in_own_thread=True)
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
            self._group.fail(error)  # the engine's connections do not survive it
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
