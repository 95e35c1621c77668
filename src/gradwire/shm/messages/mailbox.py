"""Mailbox of a rank: messages without a matching receive, and receives without a message.

As in MPI, messages match receives by source and tag, in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import DistributedError, MismatchError
from gradwire.shm.runtime.work import ShmWork


@dataclass(eq=False, slots=True)
class Envelope:
    """A message that has arrived."""

    source: int
    tag: int
    data: Tensor


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that waits for its message; a source of None means any rank."""

    source: int | None
    tag: int
    tensor: Tensor
    work: ShmWork

    def fits(self, source: int, tag: int) -> bool:
        """Return True if the receive matches a message of this source and tag."""
        return self.tag == tag and self.source in (source, None)

    def takes_in_place(self, dtype: torch.dtype, count: int) -> bool:
        """Return True if the bytes of such a message can be written straight into the tensor."""
        x = self.tensor
        plain = x.is_contiguous() and not (x.is_conj() or x.is_neg())
        return plain and x.dtype == dtype and x.numel() == count

    def complete(self, envelope: Envelope) -> None:
        """Copy the message and finish the receive.

        Nothing else finishes the receive of a matched message, so every path here must.
        """
        try:
            self._fill(envelope)
        except (
            MismatchError,
            RuntimeError,
        ) as error:  # an error of the tensor: the group stays usable
            self.work.finish(error)
        else:
            self.work.finish(source=envelope.source)

    def complete_in_place(self, source: int) -> None:
        """Finish the receive, whose tensor already holds the message."""
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)
        self.work.finish(source=source)

    def _fill(self, envelope: Envelope) -> None:
        tensor, data = self.tensor, envelope.data
        if (tensor.numel(), tensor.dtype) != (data.numel(), data.dtype):
            raise MismatchError(
                f"rank {envelope.source} sent {data.numel()} elements of {data.dtype} (tag "
                f"{envelope.tag}), but recv was given a tensor of "
                f"{tensor.numel()} elements of {tensor.dtype}"
            )
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(data.view(tensor.shape))


class Mailbox:
    """Unexpected messages and posted receives of a rank; used with the links' lock held.

    The thread that matches a message and a receive removes both under the lock and copies after
    releasing it. The copy of a large message must delay neither other receives nor the errors of
    receives whose peer is lost.

    Attributes:
        last_post: Time of the last post of a receive, by `time.monotonic`; 0 if a message was sent
            since then.
    """

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self.last_post = 0.0
        self._silent: set[int] = set()  # peers from which no message can arrive any more
        self._unexpected: deque[Envelope] = deque()
        self._posted: deque[PostedReceive] = deque()

    def holds_any(self) -> bool:
        """Return True if there are messages or receives; without the lock, as of some moment."""
        return bool(self._posted or self._unexpected)

    def post(self, receive: PostedReceive) -> Envelope | None:
        """Return the first matching message that has arrived; keep the receive if there is none."""
        for envelope in self._unexpected:
            if receive.fits(envelope.source, envelope.tag):
                self._unexpected.remove(envelope)
                return envelope
        self._posted.append(receive)
        return None

    def find(self, source: int, tag: int) -> PostedReceive | None:
        """Return the first matching posted receive, if any; it stays posted."""
        for receive in self._posted:
            if receive.fits(source, tag):
                return receive
        return None

    def take(self, receive: PostedReceive) -> bool:
        """Remove a receive, which the caller then finishes; False if it is no longer posted."""
        posted = self._posted
        if receive not in posted:
            return False
        posted.remove(receive)
        return True

    def keep(self, envelope: Envelope) -> None:
        """Keep a message without a matching receive."""
        self._unexpected.append(envelope)

    def fail(self, source: int, error: DistributedError) -> None:
        """Fail the receives from a lost peer, after all of its messages were taken.

        If all peers are lost, fail the receives from any rank as well.
        """
        self._silent.add(source)
        all_silent = len(self._silent) == self._peers
        failed = [
            w for w in self._posted if w.source == source or (w.source is None and all_silent)
        ]
        for receive in failed:
            self._posted.remove(receive)
            if not receive.work.is_done():
                receive.work.finish(error)

    def fail_all(self, error: DistributedError) -> None:
        """Fail all posted receives."""
        while self._posted:
            receive = self._posted.popleft()
            if not receive.work.is_done():
                receive.work.finish(error)

    def cancel(self, work: ShmWork) -> bool:
        """Remove a receive; return False if a message had matched it."""
        kept = deque(w for w in self._posted if w.work is not work)
        cancelled = len(kept) < len(self._posted)
        self._posted = kept
        return cancelled
