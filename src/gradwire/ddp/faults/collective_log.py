"""Log of a rank's recent collectives, and the rounds in which ranks come back in step by it.

When a rank fails within a backward, the others wait in collectives that it never joined, and a
backend such as Gloo cannot abort them. Every rank therefore logs its collectives, numbered by the
backend's own count. After an error the ranks compare their logs, and a rank that is behind joins
the collectives that it missed, with zeros (see `protocol`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from gradwire._torch import is_done
from gradwire.ddp.faults.error_channel import (
    ErrorChannel,
    Handle,
    broadcast_options,
    first_failure,
)
from gradwire.ddp.faults.protocol import (
    BackwardState,
    Phase,
    Statement,
    diverged,
    missing,
    next_phase,
)
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm import shm_backend_of

Entry = list[Any]
"""Collective as JSON: [op, root, number of the reduce op, lists of tensors].

A tensor is [dtype, device type, shape, sparse dims]; sparse dims is None for a dense tensor."""

LOGGED = 1024
"""Number of a group's last collectives that are kept."""
MAX_BYTES = 1 << 36
"""Maximum size of a tensor in another rank's log, which this rank allocates to join."""


def entry_of(op: str, lists: Sequence[Sequence[Tensor]], root: int = 0, reduce: int = 0) -> Entry:
    """Return the entry for a collective on these lists of tensors."""
    if op == "allgather_":  # a rank's own part is among the outputs, and may have its own size
        lists = lists[:1]
    elif op not in _JOINABLE:  # sizes may differ between ranks
        lists = ()
    return [op, root, reduce, [[describe(t) for t in tensors] for tensors in lists]]


class CollectiveLog:
    """Collectives of all reducers of a group that other ranks may still wait in."""

    # A collective's number is the backend's count, the same on all ranks. A collective that is not
    # in the log leaves a gap.

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a domain must not keep its group alive
        self._name, self._counted = _name_of(group), 0
        self.small: list[Work] = []
        # time at which the first of `sent` was sent
        self.since = 0.0
        # collectives on the group, with their numbers
        self.sent: list[tuple[int, Entry]] = []
        # collectives of communication hooks on other groups, by `key_of` the group
        self.elsewhere: dict[str, list[tuple[int, Entry]]] = {}
        # handles of collectives that were not sent by a reducer: they distinguish a failure of the
        # backend from an error of a hook
        self.works: list[Work] = []

    def record(self, group: ProcessGroup, entry: Entry) -> None:
        """Log a collective that a hook, or a function of `collectives`, has sent on any group."""
        if _name_of(group) == self._name:
            self.add(entry)
        else:
            with suppress(RuntimeError):  # a backend that does not count: it cannot be joined
                sent = self.elsewhere.setdefault(key_of(group), [])
                sent.append((sequence_number(group), entry))
                del sent[:-LOGGED]

    def add(self, entry: Entry, work: Work | None = None) -> None:
        """Log a collective that was just sent; `work` is its handle if no participant keeps it."""
        self._counted += 1
        if not self.sent:
            self.since = monotonic()
        self.sent.append((self.position(), entry))
        del self.sent[:-LOGGED]  # without a reduced backward, nothing is forgotten
        if work is not None:
            self.small.append(work)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of collectives on the group and on others."""
        return self.position(), sum(map(len, self.elsewhere.values()))

    def failure(self) -> BaseException | None:
        """Return the failure of a hook's collective, from its handle or its shm group, or None."""
        if error := first_failure(self.works):
            return error
        for group in (self._group(), *map(group_of, self.elsewhere)):
            member = None if group is None else shm_backend_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def position(self) -> int:
        """Return the number of the last collective sent on the group."""
        group = self._group()
        assert group is not None
        try:
            return sequence_number(group)
        except RuntimeError:  # the backend does not count: count logged collectives only
            return self._counted

    def clear(self) -> None:
        self.sent.clear()
        self.elsewhere.clear()
        self.works.clear()
        self.small.clear()

    def forget(self, through: int) -> None:
        """Drop the entries up to this number, which all ranks have sent."""
        self.small.clear()
        if self.sent and self.sent[-1][0] <= through:
            self.clear()
        else:
            self.sent = [(number, entry) for number, entry in self.sent if number > through]


def _name_of(group: ProcessGroup) -> str:
    try:
        return group.group_name
    except RuntimeError:  # a group written in Python that is not registered has no name
        return f"group {id(group)}"


_REDUCTIONS = {
    "allreduce_": ("allreduce", AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", AllreduceCoalescedOptions),
    "reduce_": ("reduce", ReduceOptions),
    "_reduce_scatter_base_": ("_reduce_scatter_base", ReduceScatterOptions),
}
_JOINABLE = (*_REDUCTIONS, "broadcast_", "allgather_", "_allgather_base_", "alltoall_base_")


def check_joinable(entry: Entry) -> None:
    """Raise BrokenGroupError if a rank that is behind cannot join a collective."""
    if entry[0] not in _JOINABLE:
        raise BrokenGroupError(
            f"cannot recover: ranks are blocked in {entry[0]}; after an error only "
            f"{', '.join(_JOINABLE)} (of equal parts) can be completed"
        )


def join(group: ProcessGroup, entry: Entry) -> Work:
    """Join, with zeros, a collective that other ranks wait in; all ranks raise afterwards."""
    check_joinable(entry)
    op, root, reduce, described = entry
    # of the same shapes and dtypes: Gloo aborts a process whose sizes differ from another rank's
    data = [[_zeros(*d) for d in tensors] for tensors in described]
    if op == "broadcast_":
        return group.broadcast(data[0], broadcast_options(root))
    if op == "allgather_":
        return group.allgather([data[0]], [torch.zeros_like(data[0][group.rank()])])
    if op == "_allgather_base_":
        return group._allgather_base(data[0][0], data[1][0], AllgatherOptions())
    if op == "alltoall_base_":
        return group.alltoall_base(data[0][0], data[1][0], [], [], AllToAllOptions())
    method, kind = _REDUCTIONS[op]
    options: Any = kind()
    options.reduceOp = ReduceOp(ReduceOp.RedOpType(reduce))
    if op == "reduce_":
        options.rootRank = root
    given: Any = [part[0] for part in data] if op == "_reduce_scatter_base_" else data
    work: Work = getattr(group, method)(*given, options)
    return work


def describe(tensor: Tensor) -> list[Any]:
    """Return a tensor's dtype, device type, shape and sparse dims, as in an `Entry`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    sparse = tensor.sparse_dim() if tensor.layout is torch.sparse_coo else None
    return [dtype, tensor.device.type, list(tensor.shape), sparse]


def _zeros(dtype: str, device: str, shape: list[int], sparse: int | None) -> Tensor:
    size = 16
    for n in shape:
        size *= n
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not 0 <= size <= MAX_BYTES:
        raise BrokenGroupError(f"invalid tensor in another rank's log: {dtype} of shape {shape}")
    if sparse is None:
        return torch.zeros(shape, dtype=kind, device=device)
    indices = torch.empty(sparse, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse:], dtype=kind, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def key_of(group: ProcessGroup) -> str:
    """Return a name that identifies a group on all ranks."""
    # The group's own name is not unique: PyTorch numbers the groups of each process, so that groups
    # of different ranks may have the same name.
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return f"{group.group_name} {sorted(ranks, key=ranks.__getitem__)}"


def sequence_number(group: ProcessGroup) -> int:
    """Return the backend's count of this rank's collectives; raise RuntimeError if it has none."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def group_of(key: str) -> ProcessGroup | None:
    """Return the group with this `key_of`, or None if this rank is not a member of it."""
    for group in dist.distributed_c10d._world.pg_names:
        if isinstance(group, ProcessGroup) and key_of(group) == key:
            return group
    return None


class Participant(Protocol):
    """Interface of a reducer's `Backward` for a fault domain, which does not import it."""

    state: BackwardState
    end: int  # position of the last message, while COMMITTING or UNDECIDED

    launcher: Any  # whose `in_flight` returns the communication in progress

    def start_over(self) -> None:
        """Discard the running backward and all state learned from earlier ones, on all ranks."""

    def reset(self) -> None:
        """Discard the running backward."""


class Participants(weakref.WeakValueDictionary[int, Participant]):
    """Existing reducers, by identity: a module may be deleted before its group."""

    def all(self) -> list[Any]:
        # a copy, in one step: other threads make reducers, and the garbage collector removes them
        return [p for reference in self.valuerefs() if (p := reference()) is not None]

    def others(self, than: Participant) -> Sequence[Any]:
        """Return all participants but one; all are of its class."""
        return [p for p in self.all() if p is not than] if len(self) > 1 else ()

    def undecided(self) -> list[int]:
        """Return the last-message positions of backwards whose step other ranks may have taken."""
        if any(p.state is BackwardState.INTERRUPTED for p in self.all()):
            # another reducer was interrupted in the same backward, which then fails on the other
            # ranks, too
            return []
        return [p.end for p in self.all() if p.state is BackwardState.UNDECIDED]

    def start_over(self) -> None:
        for participant in self.all():
            participant.start_over()

    def reset(self) -> None:
        for participant in self.all():
            participant.reset()


RESYNC_TIMEOUT_SECONDS = 300.0
"""Maximum time to wait for other ranks, which notice an error when they next poll."""
LIVENESS_SECONDS = 0.5
"""Interval at which a rank checks that silent ranks are still running."""
UNDECIDED_TEXT = (
    "backward was interrupted by an exception after its last message: ranks that reduced gradients "
    "in that step have taken a step that this rank has not; give all ranks the same parameters"
)


def _check_joinable(statements: Sequence[Statement]) -> None:
    sent = [(s.position, s.sent) for s in statements]
    for entry in missing(min(s.position for s in statements), sent):
        check_joinable(entry)


class ResynchronizationRound:
    """Round that publishes a statement, joins missed collectives and publishes the outcome."""

    # From its beginning on, this rank only sends collectives that others wait in.

    def __init__(
        self,
        group: ProcessGroup,
        channel: ErrorChannel,
        log: CollectiveLog,
        participants: Participants,
        error: str | None,
        seconds: float,
    ) -> None:
        self._group, self._channel, self._log = group, channel, log
        elsewhere = {
            name: (max(number for number, _ in sent), sent) for name, sent in log.elsewhere.items()
        }
        undecided = max(participants.undecided(), default=None)
        # the error is None if this rank only learnt of another rank's error
        self._statement = Statement(error, log.position(), list(log.sent), elsewhere, undecided)
        self._in_flight: list[Handle] = [
            *log.works,
            *log.small,
            *(one for p in participants.all() for one in p.launcher.in_flight()),
        ]
        # valid after `advance` has returned True: stated position of each rank, and a message about
        # ranks that missed, because of an exception, a step that others may have taken
        self.positions: list[int] = []
        self.diverged = ""
        self._failures: dict[int, str] = {}
        self._broken: BrokenGroupError | None = None
        self._timeout = min(RESYNC_TIMEOUT_SECONDS, seconds)
        self._deadline = time.monotonic() + self._timeout
        self._next_check = 0.0
        self._phase = Phase.STATED
        self._goal = self._statement.position
        self._outcome: str | None = None
        self._reported = error is None
        self._published: set[str] = set()

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if the round is over."""
        if (broken := self._channel.broken()) is not None:
            raise broken
        while True:
            before = self._phase
            if before is Phase.STATED:
                self._exchange_statements()
            elif before is Phase.JOINING:
                ended = self._ended()
                self._phase = next_phase(before, stated=True, ended=ended, joined=False)
            elif before is Phase.JOINED:
                self._compare_outcomes()
            if self._phase is Phase.DONE:
                return True
            if self._phase is before:
                self._check_liveness()
                return False

    def error(self) -> DistributedError | None:
        """Return the error for this rank to raise after the round, unless it is its own."""
        if self._broken is not None or self._statement.error is not None:
            return self._broken
        errors = "; ".join(f"rank {rank}: {text}" for rank, text in self._failures.items())
        text = f"gradients were not reduced, because of an error elsewhere. {errors}"
        return PeerFailedError(text, self._failures)

    def publish_statement(self) -> None:
        self._publish("statement", asdict(self._statement))
        self._reported = self._reported or self._channel.report()

    def check_joinable(self) -> None:
        """Raise BrokenGroupError if others cannot join the collective that this rank waits in."""
        if published := self._channel.published("statement"):
            _check_joinable([Statement(**one) for one in published])

    def _exchange_statements(self) -> None:
        published = self._channel.published("statement")
        if published is None:
            return
        statements = [Statement(**one) for one in published]
        self.positions = [s.position for s in statements]
        if ranks := diverged([s.undecided for s in statements], self.positions):
            self.diverged = f"ranks {ranks}: {UNDECIDED_TEXT}"
        self._failures = {r: s.error for r, s in enumerate(statements) if s.error is not None}
        self._goal = max(self.positions)
        try:
            self._join(statements)
        except BrokenGroupError as broken:
            self._outcome = str(broken)
        # The phase changes last: after an exception of a signal handler the next call repeats this
        # method, and the position in the log shows which collectives were joined.
        self._phase = next_phase(self._phase, stated=True, ended=False, joined=False)

    def _join(self, statements: Sequence[Statement]) -> None:
        own = self._log.position()
        # Check on all ranks: a rank that waits in a collective that cannot be joined would wait
        # until its deadline.
        _check_joinable(statements)
        for entry in missing(own, [(s.position, s.sent) for s in statements]):
            self._in_flight.append(join(self._group, entry))
        for name in sorted({name for s in statements for name in s.elsewhere}):
            group = group_of(name)
            if group is not None:
                at = sequence_number(group)
                stated = [s.elsewhere[name] for s in statements if name in s.elsewhere]
                for entry in missing(at, [(at, ()), *stated]):
                    self._in_flight.append(join(group, entry))

    def _ended(self) -> bool:
        """Return True if all communication has ended or will not end."""
        if self._outcome is not None:
            return True
        if self._log.position() > self._goal:
            self._outcome = "a hook sent further collectives after the error"
        elif all(
            h.done() if isinstance(h, torch._C.Future) else is_done(h) for h in self._in_flight
        ):
            self._raise_failure()
        elif time.monotonic() > self._deadline:
            self._outcome = f"collectives were still in progress after {self._timeout:g} s"
        else:
            return False
        return True

    def _compare_outcomes(self) -> None:
        self._publish("joined", self._outcome)
        outcomes = self._channel.published("joined")
        joined = outcomes is not None
        self._phase = next_phase(self._phase, stated=True, ended=True, joined=joined)
        if outcomes is not None and any(outcomes):
            reason = "; ".join(f"rank {r}: {v}" for r, v in enumerate(outcomes) if v)
            causes = "; ".join(f"rank {r}: {text}" for r, text in self._failures.items())
            self._broken = BrokenGroupError(
                f"after an error ({causes}) the group's ranks cannot be brought back in step "
                f"({reason}): make a new process group, or restart"
            )

    def _check_liveness(self) -> None:
        """Raise if missing statements or outcomes can no longer arrive."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + LIVENESS_SECONDS
        if self._phase is not Phase.JOINING:  # while JOINING, a failure is the outcome
            self._raise_failure()
        # A rank that is JOINING waits for all ranks, and no rank ends the round before it does.
        topic = "statement" if self._phase is Phase.STATED else "joined"
        silent = self._channel.missing_ranks(topic)
        dead = self._channel.dead(silent)
        # Ask again: a rank may have published its answer and ended between the two requests.
        if dead and (dead := [r for r in self._channel.missing_ranks(topic) if r in dead]):
            raise PeerLostError(f"ranks {dead} ended while resynchronizing after an error")
        if self._phase is Phase.JOINING:  # has a deadline of its own
            return
        # The others may be JOINING until their own deadline and publish their outcome only then.
        if now > self._deadline + self._timeout * (self._phase is Phase.JOINED):
            raise CollectiveTimeoutError(
                f"ranks {silent} did not answer within {self._timeout:g} s after an error"
            )

    def _raise_failure(self) -> None:
        if failure := first_failure(self._in_flight):
            raise PeerLostError(f"a rank was lost while resynchronizing: {failure}") from failure

    def _publish(self, topic: str, value: Any) -> None:
        if topic not in self._published and self._channel.publish(topic, value):
            self._published.add(topic)
