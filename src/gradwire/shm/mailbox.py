"""Point-to-point messages: sent at once, kept at the receiver until they are asked for.

Short ones travel on the link itself, long ones in shared memory of their own whose descriptor
travels there. They meet a receive of their tag, in the order in which they came.
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
    number, count = NUMBERS[flat.dtype], flat.numel()
    if flat.nbytes <= _ON_THE_LINK:
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        links.send(peer, Kind.DATA, deadline, tag=tag, a=number, b=count, data=data)
        return
    fd = segment.create(flat.nbytes)
    try:
        segment.map_tensor(fd).view(flat.dtype).copy_(flat)
        links.send(peer, Kind.DATA, deadline, tag=tag, a=number, b=count, fd=fd)
    finally:
        os.close(fd)


@dataclass(eq=False)
class _Wanted:
    source: int | None
    tag: int
    tensor: Tensor
    work: ShmWork


@dataclass(eq=False)
class _Letter:
    source: int
    tag: int
    data: Tensor


class Mailbox:
    """The messages that came to a rank, and those it waits for; used under the links' lock.

    What fits is taken out under the lock, and copied by who took it out when that has let go of the
    lock: a large message must hold up neither other receives nor news of lost peers.
    """

    def __init__(self) -> None:
        self._letters: deque[_Letter] = deque()
        self._wanted: deque[_Wanted] = deque()

    def want(
        self, source: int | None, tag: int, tensor: Tensor, work: ShmWork
    ) -> Callable[[], None] | None:
        """Have a tensor filled with the next message; None is any source.

        Returns:
            If the message was there, what fills the tensor, to be called without the lock.
        """
        wanted = _Wanted(source, tag, tensor, work)
        for letter in self._letters:
            if _fits(wanted, letter):
                self._letters.remove(letter)
                return partial(_hand_over, wanted, letter)
        self._wanted.append(wanted)
        return None

    def deliver(self, source: int, message: Message) -> Callable[[], None] | None:
        """Take in a message.

        Returns:
            If it is waited for, what fills the tensor, to be called without the lock.
        """
        letter = _Letter(source, message.tag, _content(message))
        for wanted in self._wanted:
            if _fits(wanted, letter):
                self._wanted.remove(wanted)
                return partial(_hand_over, wanted, letter)
        self._letters.append(letter)
        return None

    def fail(self, source: int, error: DistributedError, *, others_left: bool) -> None:
        """Let those who wait for a lost peer know; and those for any, if it could be no other."""
        hit = [
            w for w in self._wanted if w.source == source or (w.source is None and not others_left)
        ]
        for wanted in hit:
            self._wanted.remove(wanted)
            wanted.work.finish(error)

    def fail_all(self, error: DistributedError) -> None:
        """Let all that wait know that nothing more will come."""
        while self._wanted:
            self._wanted.popleft().work.finish(error)

    def forget(self, work: ShmWork) -> bool:
        """Wait no more for the message of a receive; whether it had not come."""
        kept = deque(w for w in self._wanted if w.work is not work)
        forgotten = len(kept) < len(self._wanted)
        self._wanted = kept
        return forgotten


def _content(message: Message) -> Tensor:
    dtype = DTYPES[message.a]
    if message.fd >= 0:
        return segment.map_tensor(message.fd).view(dtype)
    if not message.text:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(message.text), dtype=dtype)


def _fits(wanted: _Wanted, letter: _Letter) -> bool:
    return wanted.tag == letter.tag and wanted.source in (letter.source, None)


def _hand_over(wanted: _Wanted, letter: _Letter) -> None:
    """End a receive; nothing else does once its message was found, so that nobody waits in vain."""
    try:
        _fill(wanted.tensor, letter)
    except Exception as error:  # of the receiver's tensor: the sender and the link are well
        wanted.work.finish(error)
    else:
        wanted.work.finish(source=letter.source)


def _fill(tensor: Tensor, letter: _Letter) -> None:
    data = letter.data
    if (tensor.numel(), tensor.dtype) != (data.numel(), data.dtype):
        raise MismatchError(
            f"rank {letter.source} sent {data.numel()} elements of {data.dtype} (tag "
            f"{letter.tag}), but recv was given a tensor of "
            f"{tensor.numel()} elements of {tensor.dtype}"
        )
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(data.view(tensor.shape))
