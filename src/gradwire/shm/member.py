"""One rank's membership in a group: what it is, how its operations run, and how it ends."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    DistributedError,
    MismatchError,
    NotSupportedError,
)
from gradwire.shm.links import Message
from gradwire.shm.mailbox import Mailbox
from gradwire.shm.sync import Deadline
from gradwire.shm.team import Team
from gradwire.shm.work import Queue, ShmWork

__all__ = ["Member"]

_MEMBERS: WeakSet[Member] = WeakSet()
"""For the two events that a process can tell nobody about but all at once: its fork and its end."""

Job = Callable[[Deadline], None]
Observer = Callable[[str, int, Sequence[Sequence[Tensor]]], None]
"""Told of each collective as it is submitted: its name among torch's operators, its root, and the
tensors; what torch's dispatcher does for groups that are written in C++."""


class Member(ProcessGroup):
    """What all operations stand on.

    Args:
        rank: This rank.
        size: How many ranks.
        peers: A connection to each other rank.
        timeout: For each operation that has none of its own.

    Attributes:
        observer: Told of each collective as it is submitted, if there is one.
        mark: What the callers of the next collective have to have alike, as a number of 64 bits;
            if they have not, it raises MismatchError on all ranks.
    """

    def __init__(self, rank: int, size: int, peers: dict[int, Any], timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._names = {"name": "", "desc": ""}
        self._timeout = timeout
        self._broken: BaseException | None = None
        self._closed = ""  # why, once it is
        self._mailbox, self._lost = Mailbox(), 0
        self._team = Team(
            rank, size, peers, self._deliver, self._on_lost, Deadline(timeout.total_seconds())
        )
        self._queue = Queue(f"gradwire-shm-{rank}")
        self.observer: Observer | None = None
        self._submitted = self.mark = 0
        _MEMBERS.add(self)

    # --- what it is ---

    def getBackendName(self) -> str:
        """The backend's name."""
        return "shm"

    def getRank(self) -> int:
        """This rank."""
        return self._rank

    def getSize(self) -> int:
        """How many ranks."""
        return self._size

    def getGroupName(self) -> str:
        """The name torch.distributed gave it."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        """Take the name torch.distributed gives."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        """Its description."""
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:
        """Take a description."""
        self._names["desc"] = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    name = getBackendName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property  # type: ignore[misc]
    def bound_device_id(self) -> None:
        """No device: the group carries CPU tensors."""
        return

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations from now on that have none of their own."""
        self._timeout = timeout

    def allocate(self, nbytes: int) -> Tensor:
        """New bytes in memory that the ranks share."""
        self._check_usable()
        return self._team.allocate(nbytes)

    # --- its end ---

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        if not self._closed:
            self._closed = "the group was destroyed on this rank: make a new one"
            self._queue.close()
            self._team.close()
            self._mailbox.fail_all(BrokenGroupError(self._closed))

    def abort(self) -> None:
        """Leave the group without waiting for operations in flight; they fail."""
        if not self._closed:
            error = BrokenGroupError("the group was aborted on this rank")
            self._break(error)
            links = self._team.links
            links.aborted = error
            with links.changed:
                self._mailbox.fail_all(error)

    def _leave_at_exit(self) -> None:
        # what the others take part in may end; what they do not must not hold up the process
        self._team.links.aborted = BrokenGroupError("the process of this rank ends")
        self.shutdown()

    def _leave_in_child(self) -> None:
        if not self._closed:
            self._closed = "this process was forked from a rank: only the rank can use its groups"
            self._team.links.close_in_child()

    def splitGroup(self, *args: object) -> ProcessGroup:
        """Not there.

        Raises:
            NotSupportedError: Always.
        """
        raise NotSupportedError("shm groups cannot be split: use torch.distributed.new_group")

    split_group = splitGroup

    def _start_coalescing(self, device: torch.device) -> None:
        raise NotSupportedError(
            "shm has no coalescing of unlike operations: use the *_coalesced operations, or "
            "several with async_op=True"
        )

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were submitted: equal on ranks that are in step."""
        return self._submitted

    # --- how operations run ---

    def _submit(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        seen: tuple[str, int, Sequence[Sequence[Tensor]]] = ("a collective", 0, ()),
    ) -> Work:
        self._check_usable()
        self._submitted += 1
        if self.observer is not None:
            self.observer(*seen)
        mark, self.mark = self.mark, 0
        inference = any(tensor.is_inference() for tensor in tensors)
        own = opts.timeout.total_seconds()
        seconds = own if own > 0 else self._timeout.total_seconds()

        def guarded() -> None:
            self._check_usable()
            self._team.mark = mark
            try:
                if inference:  # such tensors can only be written there, in whatever thread
                    with torch.inference_mode():
                        job(Deadline(seconds))
                else:
                    job(Deadline(seconds))
            except MismatchError:
                raise  # on all ranks, before any data moved: they are still in step
            except BaseException as error:
                self._break(error)
                raise

        return self._queue.submit(guarded, ShmWork(tensors), wait=not opts.asyncOp)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            self._team.links.give_up(error)

    def _check_usable(self) -> None:
        if self._closed:
            raise BrokenGroupError(self._closed)
        if self._broken is not None:
            raise BrokenGroupError(
                "the group cannot be used since an operation failed with "
                f"{type(self._broken).__name__}: {self._broken}; destroy it and make a new one"
            ) from self._broken

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._size:
            raise ArgumentError(f"root is rank {root}: the group's ranks are 0 to {self._size - 1}")
        return root

    def _check_peer(self, peer: int, name: str) -> None:
        if not 0 <= peer < self._size or peer == self._rank:
            raise ArgumentError(
                f"{name} is rank {peer}: give another rank of the group than this one "
                f"({self._rank}), from 0 to {self._size - 1}"
            )

    def _one_each(self, tensors: list[Tensor], name: str) -> list[Tensor]:
        if len(tensors) != self._size:
            raise ArgumentError(
                f"{name} has {len(tensors)} tensors: give one for each of {self._size} ranks"
            )
        return tensors

    def _check_parts(self, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"the larger tensor has {whole.numel()} elements: it needs "
                f"{self._size} times {part.numel()} of the smaller"
            )

    def _deliver(self, peer: int, message: Message) -> None:
        self._mailbox.deliver(peer, message)

    def _on_lost(self, peer: int, error: DistributedError) -> None:
        self._lost += 1  # counted here: a peer may be lost before there is a team
        self._mailbox.fail(peer, error, others_left=self._lost < self._size - 1)


def _at_exit() -> None:
    """End the groups' threads: Python does not let them, and one amid a kernel would crash."""
    for member in list(_MEMBERS):
        member._leave_at_exit()


def _in_child() -> None:
    for member in list(_MEMBERS):
        member._leave_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
