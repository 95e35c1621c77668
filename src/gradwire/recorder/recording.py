"""Ring of the last collectives of this process: always on, with fixed length.

This module is the part that runs for each collective; all other modules read the ring later. Times
are of CLOCK_MONOTONIC, which the processes of a host share. The ring keeps sizes, not tensors.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.recorder.files import RingFile
from gradwire.recorder.groups import RecordedGroup, reference_to
from gradwire.recorder.lines import call_stack, caller, is_users, read_stack

LENGTH = 2000
"""Number of entries, as in torch's flight recorder."""

CHECKS_FINITE = os.environ.get("GRADWIRE_CHECK_FINITE", "0") not in ("", "0")
"""True if tensors are checked for NaN and infinity before a reduction spreads them.

That reads every element of the buckets of gradwire's DistributedDataParallel and of all inputs of
collectives on shm, and waits for the device.
"""
_MOST_NOT_FINITE = 8
not_finite: list[dict[str, Any]] = []
"""First tensors with NaN or infinity that this rank was about to send."""

Shapes = torch.Size | tuple[torch.Size, ...]
"""Shape of one tensor, or of several."""


GROUP, NUMBER, OP, INPUTS, OUTPUTS, DTYPE, CODE, INSTRUCTION = range(8)
CREATED, STARTED, ENDED, WAITS, ERROR, PEER, SLOT = range(8, 15)

Entry = list[Any]
"""One collective of this rank, or one message to or from another rank.

It is a list because creating one takes 1 µs, where an object takes 3. Its fields:

- GROUP: `RecordedGroup`.
  - NUMBER: number of the collective in the group, equal on all ranks.
- OP: name of the operation.
- INPUTS, OUTPUTS, DTYPE: shapes and dtype of the tensors; the dtype is None without tensors.
- CODE, INSTRUCTION: line of the user's code that called it.
- CREATED, STARTED, ENDED: times when it was enqueued, began to run and ended; 0 if not yet.
- WAITS: time spent waiting for each rank of the group, in ns; or None.
- ERROR: error it failed with, or None.
  - PEER: other rank of a message, -1 for any; None for a collective.
- SLOT: index of its end in the ring file; None without a file.
"""


@dataclass(slots=True, eq=False)
class BucketRecord:
    """Bucket of a backward pass, which no backend knows."""

    group: weakref.ref[ProcessGroup]
    # number of the backward pass, counted by the reducer
    step: int
    # in launch order
    index: int
    # names of its parameters
    names: Sequence[str]
    # bytes sent; 0 if sparse
    nbytes: int = 0
    # numbers of its first and last collective; `last < first` if it sent none
    first: int = 0
    last: int = -1
    # times when all gradients were ready, when they were packed, and when the collective was
    # enqueued
    ready: int = field(default_factory=perf_counter_ns)
    packed: int = 0
    sent: int = 0
    # times when this rank began to wait for it, and when it was reduced
    waited: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Times of a reduced backward pass."""

    # number of the backward pass, counted by the reducer
    step: int
    # start times
    forward: int
    backward: int
    # when the last gradient was ready, and when all gradients were reduced
    computed: int
    reduced: int
    # CPU time that the process, with all its threads, had used by then
    cpu: int = 0


@dataclass(frozen=True, slots=True)
class CollectionRecord:
    """Start and end of a garbage collection."""

    start: int
    end: int


class Collections:
    """Garbage collections of at least some time, the first ones until `stop`."""

    def __init__(self, least_ns: int, most: int) -> None:
        self.records: list[CollectionRecord] = []
        self._least_ns, self._most, self._start = least_ns, most, 0
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Stop recording."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = perf_counter_ns()
        if phase == "start":
            self._start = now
        elif now - self._start > self._least_ns and len(self.records) < self._most:
            self.records.append(CollectionRecord(self._start, now))


class Ring:
    """Recorder of the last collectives of a process."""

    def __init__(self) -> None:
        # False to measure the cost of recording
        self.on = True
        self.entries: deque[Entry] = deque(maxlen=LENGTH)
        self.buckets: deque[BucketRecord] = deque(maxlen=LENGTH)
        # of collectives on backends that record themselves without end times: group, number and
        # time
        self.ends: deque[tuple[weakref.ref[ProcessGroup], int, int]] = deque(maxlen=LENGTH)
        # called with each entry and bucket as it begins, and with each step; see `timeline`
        self.listener: Callable[[Any], None] | None = None
        # total number of entries
        self.recorded = 0
        # also gets the calls, and outlives a crash; None without a directory
        self.file: RingFile | None = None

    def begin(
        self,
        group: RecordedGroup,
        number: int,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Entry | None:
        """Record a collective that is being enqueued."""
        if not self.on:
            return None
        if CHECKS_FINITE:
            check_inputs(op, inputs)
        first = inputs or outputs
        # a call of `_shapes` less in the most frequent case
        shapes = inputs[0].shape if len(inputs) == 1 else _shapes(inputs)
        results = shapes if outputs is inputs else _shapes(outputs)
        dtype = first[0].dtype if first else None
        entry: Entry = [group, number, op, shapes, results, dtype, *caller(op, 3)]
        entry += perf_counter_ns(), 0, 0, None, None, None, None
        return self._add(entry)

    def begin_again(self, like: Entry, number: int, call: str) -> Entry | None:
        """Record a collective that differs from an earlier one only in number, line and times."""
        if not self.on:
            return None
        # `like` is a copy of the earlier entry from its beginning
        entry = like.copy()
        entry[NUMBER], entry[SLOT] = number, None
        entry[CODE], entry[INSTRUCTION] = caller(call, 3)
        entry[CREATED] = perf_counter_ns()
        return self._add(entry)

    def begin_message(
        self,
        group: RecordedGroup,
        op: str,
        tensor: Tensor,
        peer: int,
    ) -> Entry | None:
        """Record a message to or from a rank of the group; `peer` is -1 for any rank."""
        if not self.on:
            return None
        entry: Entry = [group, 0, op, tensor.shape, tensor.shape, tensor.dtype, *caller(op, 3)]
        entry += perf_counter_ns(), 0, 0, None, None, peer, None
        return self._add(entry)

    def _add(self, entry: Entry) -> Entry:
        if not entry[GROUP].named:
            entry[GROUP].find_name()
        self.entries.append(entry)
        self.recorded += 1
        if self.file is not None and entry[PEER] is None:
            at = entry[CODE], entry[INSTRUCTION], entry[CREATED]
            entry[SLOT] = self.file.begin(entry[NUMBER], entry[OP], *at)
        if self.listener is not None:
            self.listener(entry)
        return entry

    def end(self, group: ProcessGroup, number: int) -> None:
        """Record the end of the wait for a collective, on a backend that records itself."""
        if self.on:
            self.ends.append((reference_to(group), number, perf_counter_ns()))

    def begin_bucket(
        self, group: ProcessGroup, step: int, index: int, names: Sequence[str]
    ) -> BucketRecord | None:
        """Record a bucket whose gradients are all ready."""
        if not self.on:
            return None
        bucket = BucketRecord(reference_to(group), step, index, names)
        self.buckets.append(bucket)
        if self.listener is not None:
            self.listener(bucket)
        return bucket

    def check_bucket(self, bucket: BucketRecord, parameters: Sequence[Tensor]) -> None:
        """Note gradients of a bucket that are not finite, if that is checked."""
        if CHECKS_FINITE and len(not_finite) < _MOST_NOT_FINITE:
            pairs = zip(bucket.names, parameters, strict=True)
            bad = [name for name, p in pairs if p.grad is not None and not _is_finite([p.grad])]
            if bad:
                _note("the gradients", bucket.step, bad)

    def add_step(self, step: int, forward: int, backward: int, computed: int, reduced: int) -> None:
        """Record the times of a reduced backward pass, as in `StepRecord`."""
        if self.listener is not None:
            times = forward, backward, computed, reduced
            self.listener(StepRecord(step, *times, process_time_ns()))


def record_start(entry: Entry) -> None:
    """Record that a collective begins to run."""
    entry[STARTED] = perf_counter_ns()


def record_end(entry: Entry, waits: dict[int, int] | None) -> None:
    """Record that a collective has ended, and the ns spent waiting for each rank of the group."""
    entry[ENDED], entry[WAITS] = perf_counter_ns(), waits
    if entry[SLOT] is not None and ring.file is not None:
        ring.file.integers[entry[SLOT]] = entry[ENDED]


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tensors[0].shape if len(tensors) == 1 else tuple(x.shape for x in tensors)


# -- NaN and infinity ----------------------------------------------------------------------------


def check_inputs(op: str, tensors: Sequence[Tensor]) -> None:
    """Note a collective whose inputs are not finite."""
    if len(not_finite) < _MOST_NOT_FINITE and not _is_finite(tensors):
        _note(f"the input of {op}", None, [])


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        numbers = values.is_floating_point() or values.is_complex()
        if numbers and not bool(torch.isfinite(values).all()):
            return False
    return True


def _note(what: str, step: int | None, parameters: list[str]) -> None:
    locations = [at for at in call_stack(sys._getframe(1)) if is_users(at[0].co_filename)]
    noted = {"what": what, "step": step, "parameters": parameters, "time": time.time_ns()}
    not_finite.append(noted | {"lines": read_stack(locations)[:4]})  # none in autograd's threads


ring = Ring()
"""Ring of this process."""
