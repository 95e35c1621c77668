"""Point-to-point messages: sent at once, kept at the receiver until a receive matches them.

Short messages travel over the connection itself, long ones in shared memory of their own, whose
descriptor travels over it. As in MPI, a message matches a receive by source and tag, in the order
in which they were sent.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.errors import DistributedError, MismatchError
from gradwire.shm import segment
from gradwire.shm.header import DTYPES, NUMBERS
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.sync import Deadline
from gradwire.shm.work import ShmWork

__all__ = ["Mailbox", "send"]

_ON_THE_LINK = 16 << 10


def send(links: Links, peer: int, tag: int, flat: Tensor, deadline: Deadline) -> None:
    """Send a 1-d contiguous tensor; it can be changed once this returns.

    Raises:
        PeerLostError: The peer is gone.
        CollectiveTimeoutError: It has not read what came before.
    """
    message = Message(Kind.DATA, tag, NUMBERS[flat.dtype])
    if flat.nbytes <= _ON_THE_LINK:
        message.data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        links.send(peer, message, deadline)
        return
    message.fd = segment.create(flat.nbytes)
    try:
        segment.map_tensor(message.fd).view(flat.dtype).copy_(flat)
        links.send(peer, message, deadline)
    finally:
        os.close(message.fd)


@dataclass(eq=False)
class _PostedReceive:
    """A receive whose message has not arrived; its source is None for any."""

    source: int | None
    tag: int
    tensor: Tensor
    work: ShmWork


@dataclass(eq=False)
class _Envelope:
    """A message that has arrived."""

    source: int
    tag: int
    data: Tensor


class Mailbox:
    """A rank's unexpected messages and its posted receives; used under the links' lock.

    The thread that matches a message and a receive removes both under the lock, and copies after
    releasing it: the copy of a large message must not delay other receives, nor the errors of those
    whose peer is lost.
    """

    def __init__(self) -> None:
        self._unexpected: deque[_Envelope] = deque()
        self._posted: deque[_PostedReceive] = deque()

    def post_receive(
        self, source: int | None, tag: int, tensor: Tensor, work: ShmWork
    ) -> Callable[[], None] | None:
        """Fill a tensor with the next message from `source`, None for any rank.

        Returns:
            If the message has arrived, the function that copies it, to be called without the lock.
        """
        receive = _PostedReceive(source, tag, tensor, work)
        for envelope in self._unexpected:
            if _fits(receive, envelope):
                self._unexpected.remove(envelope)
                return partial(_complete, receive, envelope)
        self._posted.append(receive)
        return None

    def deliver(self, source: int, message: Message) -> Callable[[], None] | None:
        """Match a message that arrived with a receive, or keep it.

        Returns:
            If a receive matched, the function that copies it, to be called without the lock.
        """
        envelope = _Envelope(source, message.tag, _content(message))
        for receive in self._posted:
            if _fits(receive, envelope):
                self._posted.remove(receive)
                return partial(_complete, receive, envelope)
        self._unexpected.append(envelope)
        return None

    def fail(self, source: int, error: DistributedError, *, others_left: bool) -> None:
        """Fail the receives from a lost peer, and if no peer is left, those from any rank."""
        failed = [
            w for w in self._posted if w.source == source or (w.source is None and not others_left)
        ]
        for receive in failed:
            self._posted.remove(receive)
            receive.work.finish(error)

    def fail_all(self, error: DistributedError) -> None:
        """Fail all posted receives."""
        while self._posted:
            self._posted.popleft().work.finish(error)

    def cancel(self, work: ShmWork) -> bool:
        """Remove a receive; whether its message had not arrived."""
        kept = deque(w for w in self._posted if w.work is not work)
        cancelled = len(kept) < len(self._posted)
        self._posted = kept
        return cancelled


def _content(message: Message) -> Tensor:
    dtype = DTYPES[message.number]
    if message.fd >= 0:
        return segment.map_tensor(message.fd).view(dtype)
    if not message.data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(message.data), dtype=dtype)


def _fits(receive: _PostedReceive, envelope: _Envelope) -> bool:
    return receive.tag == envelope.tag and receive.source in (envelope.source, None)


def _complete(receive: _PostedReceive, envelope: _Envelope) -> None:
    """Copy the message and finish the receive.

    Once a message is matched, nothing else finishes its receive: every path here has to.
    """
    try:
        _fill(receive.tensor, envelope)
    except Exception as error:  # the receiver's tensor is at fault: the group stays usable
        receive.work.finish(error)
    else:
        receive.work.finish(source=envelope.source)


def _fill(tensor: Tensor, envelope: _Envelope) -> None:
    data = envelope.data
    if (tensor.numel(), tensor.dtype) != (data.numel(), data.dtype):
        raise MismatchError(
            f"rank {envelope.source} sent {data.numel()} elements of {data.dtype} (tag "
            f"{envelope.tag}), but recv was given a tensor of "
            f"{tensor.numel()} elements of {tensor.dtype}"
        )
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(data.view(tensor.shape))
