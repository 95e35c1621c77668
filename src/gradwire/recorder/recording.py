"""The ring of the last collectives of this process: always on, of fixed length.

What runs for each collective is here; everything else reads it later. Times are of CLOCK_MONOTONIC,
which the processes of a host share. Tensors are not kept, their sizes are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.recorder.groups import RecordedGroup, reference_to
from gradwire.recorder.lines import caller

LENGTH = 2000
"""As many as torch's flight recorder keeps."""

Shapes = torch.Size | tuple[torch.Size, ...]
"""Of one tensor, or of several."""


GROUP, NUMBER, OP, INPUTS, OUTPUTS, DTYPE, CODE, INSTRUCTION = range(8)
CREATED, STARTED, ENDED, WAITS, ERROR, PEER, DONE = range(8, 15)

Entry = list[Any]
"""One collective of this rank, or one message between two. A list, because that takes 1 µs to make
where an object takes 3. Its fields:

- GROUP: its `RecordedGroup`; NUMBER: the group's count of collectives, equal on all ranks that are
  in step; OP: its name.
- INPUTS, OUTPUTS: the tensors' shapes; DTYPE: theirs, None where there are no tensors.
- CODE, INSTRUCTION: where in the user's code it was called.
- CREATED, STARTED, ENDED: when it was enqueued, began to run and ended; 0 if it has not.
- WAITS: for each rank of the group that this rank had to wait for, how long, in ns; or None.
- ERROR: what it failed with, or None.
- PEER: of a message, the other rank, -1 for any; DONE: whether a message has ended; None of a
  collective.
"""


class BucketRecord:
    """One bucket of one backward: what no backend knows.

    Attributes:
        group: A reference to the group.
        step: The reducer's count of backwards.
        index: Of the bucket, in the order of launch.
        names: Its parameters.
        nbytes: What it sends; 0 where that is sparse.
        first, last: The group's numbers of its collectives; `last < first` if it sent none.
        ready, packed, sent: When all gradients were there, when they were copied together, and when
            the collective was enqueued.
        waited, done: When this rank began to wait for it, and when it had it.
    """

    __slots__ = (
        "done",
        "first",
        "group",
        "index",
        "last",
        "names",
        "nbytes",
        "packed",
        "ready",
        "sent",
        "step",
        "waited",
    )

    def __init__(self, group: ProcessGroup, step: int, index: int, names: Sequence[str]) -> None:
        self.group, self.step, self.index, self.names = reference_to(group), step, index, names
        self.ready = perf_counter_ns()
        self.first, self.last, self.nbytes = 0, -1, 0
        self.packed = self.sent = self.waited = self.done = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One backward that was reduced.

    Attributes:
        step: The reducer's count.
        forward, backward: When they began.
        computed: When the last gradient was there.
        reduced: When all of them were reduced.
    """

    step: int
    forward: int
    backward: int
    computed: int
    reduced: int


class Ring:
    """The last collectives of a process.

    Attributes:
        on: Whether collectives are recorded; off only where the cost of it is measured.
        recorded: How many entries there were in all.
        ends: When collectives had ended that a backend records itself, without saying when: a
            reference to the group, the number, the time.
        listener: Given each entry and bucket as it begins, and each step, if there is one; see
            `timeline`.
    """

    def __init__(self) -> None:
        self.on = True
        self.entries: deque[Entry] = deque(maxlen=LENGTH)
        self.buckets: deque[BucketRecord] = deque(maxlen=LENGTH)
        self.ends: deque[tuple[weakref.ref[ProcessGroup], int, int]] = deque(maxlen=LENGTH)
        self.listener: Callable[[Any], None] | None = None
        self.recorded = 0

    def begin(
        self,
        group: RecordedGroup,
        number: int,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Entry | None:
        """Record a collective that is being enqueued; whoever runs it sets the times."""
        if not self.on:
            return None
        first = inputs or outputs
        entry = [
            group,
            number,
            op,
            (shapes := _shapes(inputs)),
            shapes if outputs is inputs else _shapes(outputs),
            first[0].dtype if first else None,
            *caller(op, 3),
            perf_counter_ns(),
            0,
            0,
            None,
            None,
            None,
            None,
        ]
        if not group.named:
            group.find_name()
        self.entries.append(entry)  # inlined `_add`, here and below: each call is measurable
        self.recorded += 1
        if self.listener is not None:
            self.listener(entry)
        return entry

    def begin_again(self, like: Entry, number: int, call: str) -> Entry | None:
        """Record a collective that differs from an earlier one by its number, line and times alone.

        Args:
            like: The earlier one, as it was begun.
            number: Of this one.
            call: What of gradwire's is called by the user, for `caller`.
        """
        if not self.on:
            return None
        entry = like.copy()
        entry[NUMBER] = number
        entry[CODE], entry[INSTRUCTION] = caller(call, 3)
        entry[CREATED] = perf_counter_ns()
        self.entries.append(entry)
        self.recorded += 1
        if self.listener is not None:
            self.listener(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.recorded += 1
        if self.listener is not None:
            self.listener(entry)

    def begin_message(
        self,
        group: RecordedGroup,
        op: str,
        tensor: Tensor,
        peer: int,
        done: Callable[[], bool],
    ) -> Entry | None:
        """Record a message to a rank of the group, or from it; `peer` is -1 where it is any."""
        if not self.on:
            return None
        shape, at = tensor.shape, caller(op, 3)
        now = perf_counter_ns()
        entry = [group, 0, op, shape, shape, tensor.dtype, *at, now, 0, 0, None, None, peer, done]
        if not group.named:
            group.find_name()
        self._add(entry)
        return entry

    def end(self, group: ProcessGroup, number: int) -> None:
        """Note that the wait for a collective is over, on a backend that records itself."""
        if self.on:
            self.ends.append((reference_to(group), number, perf_counter_ns()))

    def begin_bucket(
        self, group: ProcessGroup, step: int, index: int, names: Sequence[str]
    ) -> BucketRecord | None:
        """Record a bucket whose gradients are all there."""
        if not self.on:
            return None
        bucket = BucketRecord(group, step, index, names)
        self.buckets.append(bucket)
        if self.listener is not None:
            self.listener(bucket)
        return bucket

    def add_step(self, step: int, forward: int, backward: int, computed: int, reduced: int) -> None:
        """Record the times of a reduced backward pass, as in `StepRecord`."""
        if self.listener is not None:
            self.listener(StepRecord(step, forward, backward, computed, reduced))


def record_start(entry: Entry) -> None:
    """Record that a collective begins to run."""
    entry[STARTED] = perf_counter_ns()


def record_end(entry: Entry, waits: dict[int, int] | None) -> None:
    """Record that a collective has ended.

    Args:
        entry: Entry of the collective.
        waits: Time spent waiting for each rank of the group, in ns.
    """
    entry[ENDED], entry[WAITS] = perf_counter_ns(), waits


def record_completion(entry: Entry, done: Callable[[], bool]) -> None:
    """Set the function that returns True once a message has ended."""
    entry[DONE] = done


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tensors[0].shape if len(tensors) == 1 else tuple(x.shape for x in tensors)


ring = Ring()
"""This process's."""
