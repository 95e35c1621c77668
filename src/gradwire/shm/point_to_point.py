"""Point-to-point operations of a group: through rings, or between hosts through the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._processes import Deadline
from gradwire.errors import ArgumentError, CollectiveTimeoutError, DistributedError
from gradwire.recorder import Entry, record_end, ring
from gradwire.shm.arrivals import Mailbox, PostedReceive
from gradwire.shm.engine import OWN_TAGS, Transfer, Transport
from gradwire.shm.header import NUMBERS
from gradwire.shm.incoming import Incoming
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.meeting import GroupState
from gradwire.shm.message_ring import Outgoing
from gradwire.shm.shm_group import Group
from gradwire.shm.tensors import (
    check_results,
    check_tensors,
    flat_of,
    is_ordinary,
    only,
    write_back,
)
from gradwire.shm.work import ShmWork, ended, wait_until

_MAX_TAG = 2**30


class RingMessages:
    """Messages of a group through rings in shared memory."""

    def __init__(self, state: GroupState) -> None:
        self._mailbox, self._links = Mailbox(state.size - 1), state.links
        self.incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        for peer in range(state.size):
            if peer != state.rank:
                find, make = partial(state.find_ring, peer), partial(state.make_ring, peer)
                self.incoming[peer] = Incoming(peer, state.links, self._mailbox, find)
                self._outgoing[peer] = Outgoing(peer, state.links, make)
        state.other = self._deliver
        state.links.on_lost = lambda peer: self.incoming[peer].poll

    def _deliver(self, peer: int, message: Message) -> Callable[[], None] | None:
        """Handle a message of the connection; see `receive` of `Links`."""
        incoming = self.incoming[peer]
        if message.kind == Kind.WAKE:
            return incoming.wake
        incoming.add_rest(message)
        return incoming.poll

    def send(self, group: Group, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send a tensor, which can be changed as soon as this returns."""
        _check_tag(tag)
        tensor = data = only(tensors)
        if not (is_ordinary(tensor) and tensor.dtype in NUMBERS):
            check_tensors(tensors)
            data = flat_of(tensor)
        # before the message is sent: a dump then names a send that hangs
        entry = ring.begin_message(group.recorded, "send", tensor, dst)
        self._mailbox.last_post = 0.0
        self._outgoing[dst].send(tag, data, Deadline(group.seconds))
        if entry is not None:
            record_end(entry, None)
        return ended(tensors)

    def receive(self, group: Group, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        """Fill a tensor with the next message of a tag; from any rank if `src` is None."""
        _check_tag(tag)
        tensor, peer = only(tensors), -1 if src is None else src
        is_plain = is_ordinary(tensor) and tensor.dtype in NUMBERS
        if not is_plain:
            check_results(tensors)
        entry = ring.begin_message(group.recorded, "recv", tensor, peer)
        if src is not None and is_plain and self.incoming[src].take_now(tensor, tag):
            if entry is not None:
                record_end(entry, None)
            return ended(tensors, src)
        senders = list(self.incoming.values()) if src is None else [self.incoming[src]]
        work = _ReceiveWork(tensors, group.seconds, self._links, self._mailbox, senders)
        work.entry = entry
        self._post(PostedReceive(src, tag, tensor.detach(), work), senders, work.posted)
        if src is None and not work.is_done():
            work.want()
        return work

    def _post(self, receive: PostedReceive, senders: list[Incoming], now: float) -> None:
        """Complete a receive whose message has arrived, or post it."""
        links, mailbox = self._links, self._mailbox
        with links.lock:
            envelope = mailbox.post(receive)
        mailbox.last_post = now
        if envelope is not None:
            receive.complete(envelope)
        elif links.aborted is not None:  # by another thread, after the check above
            with links.lock:
                mailbox.fail(links.aborted)
        elif links.lost:  # receives posted before have failed already
            for sender in senders:  # not over `lost`: the links' thread may add to it
                sender.poll()

    def fail_all(self, error: DistributedError) -> None:
        """Fail all receives, posted or half filled; the links have the same error."""
        with self._links.lock:
            self._mailbox.fail(error)
        for incoming in self.incoming.values():
            incoming.poll()

    def close(self) -> None:
        """Release the rings' memory after all receives have ended."""
        for peer, outgoing in self._outgoing.items():
            outgoing.close()
            self.incoming[peer].close()


class _ReceiveWork(ShmWork):
    """Handle of a receive; a thread that waits, or asks, takes the message from the ring."""

    _callbacks_in_own_thread = True
    _wanted = False  # whether the senders were asked to wake this rank
    entry: Entry | None = None  # in the recorder

    def __init__(
        self,
        tensors: list[Tensor],
        seconds: float,
        links: Links,
        mailbox: Mailbox,
        senders: list[Incoming],
    ) -> None:
        super().__init__(tensors, seconds)
        self._links, self._mailbox = links, mailbox
        self._senders = senders
        self.posted = time.monotonic()

    def _wait(self, seconds: float | None) -> bool:
        if len(self._senders) != 1:
            return wait_until(self.is_completed, seconds)
        self._senders[0].note_wait(self.posted)
        self._senders[0].wait(self, Deadline(seconds))
        return self.is_completed()  # messages that have arrived count even after the deadline

    def _on_timeout(self, error: CollectiveTimeoutError) -> None:
        with self._links.lock:
            cancelled = self._mailbox.cancel(self)
        if cancelled:  # for good: another wait and the future raise the error as well
            self.finish(error)
        else:  # the message is arriving: the tensor is being written
            for sender in self._senders:
                sender.abandon(self)
            self._wait(None)

    def is_completed(self) -> bool:
        """Return True if it is done, with or without an error; polls for messages."""
        if not self._done:
            for sender in self._senders:
                sender.poll()
        return self._done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors."""
        future = super().get_future()
        if not self._done:
            self.want()
        return future

    def want(self) -> None:
        """Complete as soon as the message arrives, even if no thread waits or asks."""
        self._wanted = True
        for sender in self._senders:
            sender.want(self)
        if self._done:  # meanwhile
            self._forget()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark the receive as done; `source` is the sender's rank."""
        super().finish(error, source)
        if error is None and self.entry is not None:
            record_end(self.entry, None)
        if self._wanted:
            self._forget()

    def _forget(self) -> None:
        for sender in self._senders:
            sender.unwant(self)


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not -(2**31) <= tag < 2**31:
        raise ArgumentError(f"tag is {tag!r}: give an int of 32 bits")


class EngineMessages:
    """Messages of a group through the engine between hosts, also within a host."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, group: Group, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send a tensor, which must not change until the handle was waited for."""
        check_tensors(tensors)
        flat = flat_of(only(tensors))
        transfer = self._transport.send(flat, dst, _on_engine(tag))
        return _TransferWork(group, transfer, tensors, None)

    def receive(self, group: Group, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        """Fill a tensor with the next message of a tag; from any rank if `src` is None."""
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

    _callbacks_in_own_thread = True

    def __init__(
        self, group: Group, transfer: Transfer, tensors: Sequence[Tensor], flat: Tensor | None
    ) -> None:
        super().__init__(tensors, group.seconds)
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
            if self._done:
                return True
            self._transfer.wait(Deadline(seconds))
            source = -1
            if self._flat is not None:
                write_back(self._tensors[0], self._flat)
                source = self._transfer.source()
        except BaseException as error:
            self._group.fail(error)  # the engine's connections do not survive it
            self.finish(error)
        else:
            self.finish(source=source)
        finally:
            self._completing.release()
        return True

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
    return tag + OWN_TAGS
