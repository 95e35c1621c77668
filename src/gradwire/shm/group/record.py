"""Record of a group on one rank: its operations, and the reason why it cannot be used any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire.errors import BrokenGroupError
from gradwire.recorder import Entry, RecordedGroup, ring
from gradwire.shm.algorithms.shared_memory import KnownCall
from gradwire.shm.runtime.work import without_frames

Observed = tuple[str, int, int, Sequence[Sequence[Tensor]]]
"""A collective: name of torch's operator, root, number of the reduce op, and tensors."""
UNOBSERVED: Observed = ("a collective", 0, 0, ())
Observer = Callable[[str, int, int, Sequence[Sequence[Tensor]]], None]
"""Function called with the fields of `Observed` for each collective at submission. Groups in C++
are observed through torch's dispatcher instead."""


class Usability:
    """Reason for which a group cannot be used; only its `Group` changes it.

    Attributes:
        closed: Reason for which this rank has left; "" while it is in the group.
        release_pending: True if this rank has left amid an operation that still uses the memory.
    """

    def __init__(self) -> None:
        self.closed = ""
        self.release_pending = False
        self._failure: BaseException | None = None  # a copy, never raised itself

    @property
    def failure(self) -> BaseException | None:
        """Error of the operation that made the group unusable, to be raised; None if usable."""
        return None if self._failure is None else without_frames(self._failure)

    def close(self, reason: str) -> bool:
        """Record that this rank leaves; return False if it had left before."""
        joined, self.closed = not self.closed, reason
        return joined

    def fail(self, error: BaseException) -> bool:
        """Record the error of an operation; return False if one had failed before."""
        if self._failure is not None:
            return False
        self._failure = without_frames(error)
        return True

    def check(self) -> None:
        """Raise a BrokenGroupError if this rank has left the group or an operation has failed."""
        if self.closed:
            raise BrokenGroupError(self.closed)
        if self._failure is not None:
            raise BrokenGroupError(
                "the group is unusable because an operation failed with "
                f"{type(self._failure).__name__}: {self._failure}; destroy it and make a new one"
            ) from self._failure


class Recorder:
    """Record of a group's operations for `gradwire.recorder`, and for an observer.

    Args:
        backend: Backend or process group under which torch.distributed knows the group.

    Attributes:
        group: Group of the recorder's entries.
        submitted: Number of submitted collectives, equal on ranks that are in step.
        observer: Function called with each collective at its submission, or None.
    """

    def __init__(self, backend: object) -> None:
        self.group = RecordedGroup(backend)
        self.submitted = 0
        self.observer: Observer | None = None

    def begin(
        self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], observed: Observed
    ) -> Entry | None:
        """Record the submission of a collective."""
        self.submitted += 1
        entry = ring.begin(self.group, self.submitted, op, inputs, outputs)
        if self.observer is not None:
            self.observer(*observed)
        return entry

    def begin_known(self, known: KnownCall, tensors: Sequence[Tensor], op: int) -> Entry | None:
        """Record the submission of an all_reduce with a cached setup."""
        if known.like is None:
            entry = self.begin("all_reduce", tensors, tensors, ("allreduce_", 0, op, (tensors,)))
            if entry is not None and self.group.named:
                known.like = entry.copy()
            return entry
        self.submitted += 1
        entry = ring.begin_again(known.like, self.submitted, "a known all_reduce")
        if self.observer is not None:
            self.observer("allreduce_", 0, op, (tensors,))
        return entry
