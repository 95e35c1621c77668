"""Fault domain of a process group: errors of its reducers, on all of its ranks.

All reducers of a group share an error channel and a log of collectives. A rank that fails reports
its error, and all ranks resynchronize (see `protocol`): each raises an error, and every reducer of
the group starts over in the same state. If all ranks have taken part in the current backward, a
rank first completes it and raises before the next one. If the group itself fails, ranks cannot
resynchronize over it, and it stays broken.

A rank may be in several groups. While it waits in one, it polls all of them. Groups that are
resynchronizing advance together, step by step, so ranks may begin with any of them.

Messages outside of reducers (buffers, comparisons of models, join()) are completed first if another
rank has failed, and the error is raised after them. Only a failure of the group itself ends such a
wait early.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire._engine_errors import backend_failure, is_over
from gradwire._groups import COMPARED_CALLS, OBSERVERS, find_store, message_device
from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE, REDUCE_SCATTER_SINGLE
from gradwire.ddp.faults import error_channel
from gradwire.ddp.faults.collective_log import (
    UNDECIDED_TEXT,
    CollectiveLog,
    Participant,
    Participants,
    ResynchronizationRound,
    entry_of,
)
from gradwire.ddp.faults.error_channel import (
    ErrorChannel,
    PolledWork,
    backend_errors,
    timeout_of,
    wait_future,
    wait_work,
    waits_on_cpu,
)
from gradwire.ddp.faults.protocol import all_took_part, may_finish
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerLostError,
    ReductionError,
)
from gradwire.recorder import record_error
from gradwire.shm import Operations, shm_backend_of

RESYNC_POLL_SECONDS = 2e-3
_NO_STORE = (
    "the process group has no store for error reports between ranks: if one rank fails, the "
    "others wait until their timeout. Make the group with init_process_group or new_group"
)
INTERRUPTED_TEXT = "backward was interrupted by an exception"
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_WITH_INTERRUPTED: set[FaultDomain] = set()
"""Domains with a backward that an exception ended on this rank."""


class FaultDomain:
    """Errors of a group's reducers, on all ranks. Made by `FaultDomain.of`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a domain must not keep its group alive
        self.channel = ErrorChannel(group)
        if not self.channel.has_store:
            warnings.warn(_NO_STORE, stacklevel=4)
        self.participants = Participants()
        # held while anything is sent: it keeps a single order, and keeps the position constant
        # while it is stated
        self.lock = threading.RLock()
        self.log = CollectiveLog(group)
        # functions of `collectives` were called on the group: their order relative to buckets
        # counts, on all ranks
        self.has_collectives = False
        self.seconds = timeout_of(group)
        # future of the last hook call if its callbacks may send more collectives: nothing else is
        # sent on the group before it is done
        self.hook_future: torch._C.Future[Any] | None = None
        self._round: ResynchronizationRound | None = None
        self._positions: list[int] = []  # of each rank, in the last round
        self._diverged = ""  # message about ranks that missed a step before the last round
        self._deferred: DistributedError | None = None  # another rank's error, yet to be raised
        # reason that the group cannot be used again
        self.broken: str | None = None
        # last error of another rank that was raised: a hook that waits may raise it again
        self._raised: DistributedError | None = None

    @staticmethod
    def of(group: ProcessGroup) -> FaultDomain:
        with _DOMAINS_LOCK:
            domain = _DOMAINS.get(group)
            if domain is None:
                domain = _DOMAINS[group] = FaultDomain(group)
        return domain

    @staticmethod
    def known(group: ProcessGroup) -> FaultDomain | None:
        return _DOMAINS.get(group)

    def elsewhere(self) -> Sequence[Any]:
        """Return the reducers of this process's other groups."""
        if len(_DOMAINS) == 1:
            return ()
        others = [d for d in list(_DOMAINS.values()) if d is not self]
        return [p for d in others for p in d.participants.all()]

    @staticmethod
    def forget(group: ProcessGroup) -> None:
        """Remove a group's domain, with its interrupted backwards, when the group ends."""
        with _DOMAINS_LOCK:
            domain = _DOMAINS.pop(group, None)
        if domain is not None:
            domain.broken = domain.broken or "this rank has left the group"
            _WITH_INTERRUPTED.discard(domain)

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    @property
    def _gone(self) -> bool:
        """True if the group was destroyed: it may still be referenced."""
        group = self._group()
        return group is None or (self.channel.has_store and find_store(group) is None)

    @property
    def _no_error_pending(self) -> bool:
        return self._deferred is None and self.broken is None and self._round is None

    # -- rounds ----------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the group's error channel, under a random name that rank 0 broadcasts."""
        # A name from a count of groups or wrappers would differ on a rank that makes one more, such
        # as a copy of the model on rank 0.
        # the first collective of every rank on the group: when ranks verify the first model, or
        # else in its first backward
        if self.channel.name:
            return
        with self.lock:
            since, (token, work) = time.monotonic(), self.channel.start_connecting(self.group)
            try:
                work.wait()
            except RuntimeError as error:
                timed_out = is_over(since, self.seconds)
                failure = backend_failure(error, "the first message", timed_out=timed_out)
                self.give_up(failure, error)
            self.channel.connect(self.group, token)

    def begin_round(self, error: str) -> bool:
        """Begin a round with this rank's error; return False if a round had already begun."""
        if self.broken is not None:
            raise BrokenGroupError(self.broken)
        if not self.channel.has_store:
            self._break(BrokenGroupError(f"{error}; {_NO_STORE}"))
            return True
        self.connect()
        with self.lock:
            if self._round is not None:
                return False
            self._round = self._new_round(error)
        return True

    def _new_round(self, error: str | None) -> ResynchronizationRound:
        return ResynchronizationRound(
            self.group, self.channel, self.log, self.participants, error, self.seconds
        )

    def _advance(self, *, joins: bool = True) -> bool:
        """Advance a round of any rank without waiting; return True if there is more to do."""
        # If it does not join, this rank is in a collective, and only states its position.
        if self._gone or not self.channel.connected or self.broken is not None:
            return False
        # Non-blocking: a thread polls all groups while it holds the lock of one, so two threads
        # could deadlock. The thread that holds the lock advances this round.
        if not self.lock.acquire(blocking=False):
            return self._round is not None
        try:
            if self._round is None:
                if (failure := self.channel.broken()) is not None:
                    raise failure
                if not self.channel.error_reported():
                    return False
                self._round = self._new_round(None)
            self._round.publish_statement()
            if not joins:
                self._round.check_joinable()
                return True
            if not self._round.advance():
                return True
            self._end_round(self._round)
        except DistributedError as error:
            self._break(error)
        finally:
            self.lock.release()
        return False

    def _end_round(self, done: ResynchronizationRound) -> None:
        self.channel.next_round()
        self._round, self._positions, self._diverged = None, done.positions, done.diverged
        self.log.clear()
        self.hook_future = None
        COMPARED_CALLS.clear()  # ranks that failed have compared fewer
        if (error := done.error()) is None:
            return
        self._deferred = error
        if isinstance(error, BrokenGroupError):
            self.broken = str(error)
        else:
            record_error(error, group=self._group())

    def _look(self, look: Callable[[], PeerLostError | None]) -> None:
        if not self.channel.connected or not self.lock.acquire(blocking=False):
            return
        try:
            if (failure := look()) is not None:
                raise failure
        except PeerLostError as error:  # also of a store that is gone
            self._break(error)
        finally:
            self.lock.release()

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """Break the group after a failure of the group itself, and raise the error."""
        self._break(error)
        self._deferred = None
        self.participants.reset()
        raise error from cause

    def _break(self, error: DistributedError) -> None:
        record_error(error)
        self.broken, self._deferred = f"the group failed earlier: {error}", error
        self._round = None
        if self.channel.connected:
            self.channel.report_broken(str(error))

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank and raise the error."""
        record_error(error)
        reported = self.begin_round(f"{type(error).__name__}: {error}")
        _resynchronize_all()
        if not self.channel.has_store:
            self._deferred = None
            self.participants.reset()
            raise error from cause
        if self.broken is not None:
            self.raise_deferred()
        if not reported:  # another rank's error, which ended the backward on every rank
            self._deferred = None
        self.participants.start_over()
        raise error from cause

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Raise the failure of the group that made a hook fail, or else the hook's own error."""
        if error is self._raised:
            raise error
        self.raise_hidden(what, error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def raise_hidden(self, what: str, error: Exception | None = None) -> None:
        """Raise a failure of the group, which a hook's callback has ignored or made an error of."""
        if failure := self.log.failure():
            self.give_up(self.translate(failure, what), error or failure)

    def translate(self, error: BaseException, what: str) -> DistributedError:
        """Translate a backend's failure of a collective in progress to a DistributedError."""
        timed_out = is_over(self.log.since, self.seconds)
        return backend_failure(self.cause(error), what, timed_out=timed_out)

    def cause(self, error: BaseException) -> BaseException:
        """Return the first failure: on shm, operations after a failed one only report that fact."""
        member = shm_backend_of(self.group)
        first = None if member is None else member.failure
        if isinstance(error, BrokenGroupError) and isinstance(first, DistributedError):
            return first
        return error

    def note_interrupted(self) -> None:
        _WITH_INTERRUPTED.add(self)

    def report_interrupted(self) -> None:
        """End on all ranks, in all groups, the backwards that exceptions ended on this one."""
        # Call `raise_deferred` afterwards.
        if not _WITH_INTERRUPTED and self._round is None:
            return
        _WITH_INTERRUPTED.difference_update([d for d in _WITH_INTERRUPTED if d._gone])
        domains = {self, *_WITH_INTERRUPTED}
        for domain in domains & _WITH_INTERRUPTED:
            # a deferred error of another rank has already ended that backward on every rank
            if domain.broken is None and domain._deferred is None:
                undecided = domain.participants.undecided()
                domain.begin_round(UNDECIDED_TEXT if undecided else INTERRUPTED_TEXT)
        _resynchronize_all()
        for domain in domains & _WITH_INTERRUPTED:
            domain._after_interrupted()

    def _after_interrupted(self) -> None:
        # raises nothing: the caller has seen the exception itself
        _WITH_INTERRUPTED.discard(self)
        if self.broken is not None:
            return
        undecided = self.participants.undecided()
        if not self._diverged and any(all_took_part(end, self._positions) for end in undecided):
            # The backward was COMMITTING when this rank made its statement of that round, and was
            # interrupted later. The other ranks do not know yet that this rank missed the step.
            self.begin_round(UNDECIDED_TEXT)
            _resynchronize_all()
            if self.broken is not None:
                return
        self._deferred = ReductionError(self._diverged) if self._diverged else None
        self.participants.start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def before_others(self) -> None:
        """Recover and raise pending errors before a message that does not belong to a reducer."""
        # if an exception ended a backward here, the other ranks still wait in a bucket of it,
        # which the message would be matched with
        self.report_interrupted()
        self.raise_deferred()

    def raise_deferred(self) -> None:
        """Raise the error reported by another rank, or the reason that the group is broken."""
        if self._deferred is not None:
            self._raised = error = self._deferred
            self._deferred = None
            if self.broken is None:
                self.participants.start_over()
            else:
                self.participants.reset()
            raise error
        if self.broken is not None:
            raise BrokenGroupError(self.broken)

    def poll(self, waiter: Participant) -> None:
        """Complete a resynchronization that has begun, and raise its error. Called by waits."""
        _resynchronize_all()
        if self._no_error_pending:
            self._look(self.channel.death)
        if self._deferred is None and self.broken is None:
            return
        # if all ranks took part in the waiter's backward, it counts on every rank: it ends first
        if self.broken is not None or not may_finish(waiter.state, waiter.end, self._positions):
            self.raise_deferred()

    def poll_lost(self, *, look: bool) -> None:
        """Raise if the group has failed; with `look`, also check for ranks that have ended."""
        if self.broken is None:
            self._look(self.channel.broken)
        if self.broken is None and look:
            self._look(self.channel.death)
        if self.broken is not None:
            self.raise_deferred()

    def poll_known(self, waiter: Participant) -> None:
        """Call `poll` only if an error is already known on this rank, to save time without one."""
        if not self._no_error_pending:
            self.poll(waiter)


def _live(group: ProcessGroup) -> list[FaultDomain]:
    """Return the domains whose errors a collective on a group may raise."""
    own = _DOMAINS.get(group)
    if own is not None and len(_DOMAINS) == 1:  # the usual case
        return [own]
    domains = [d for d in list(_DOMAINS.values()) if d is own or not d._gone]
    return [d for d in domains if d is own or d.broken is None or d._deferred is not None]


def poll_all(group: ProcessGroup) -> None:
    """Complete resynchronizations, and raise their errors. Called by waits of no reducer."""
    _resynchronize_all()
    for domain in _live(group):
        if domain._no_error_pending:
            domain._look(domain.channel.death)
        domain.raise_deferred()


class Observer:
    """Logs a group's collectives, and polls for errors while this rank waits for them."""

    def __init__(
        self, group: ProcessGroup, domains: Sequence[FaultDomain], poll: Callable[[], None]
    ) -> None:
        self._group, self._domains, self._poll = group, domains, poll
        self._next_look = 0.0

    def sent(self, op: str, root: int, reduce: int, lists: Sequence[Sequence[Tensor]]) -> None:
        """Log a collective that has just been sent, or is about to be on shm."""
        entry = entry_of(op, lists, root, reduce)
        for domain in self._domains:
            domain.log.record(self._group, entry)

    def polled(self, work: Work, *, on_cpu: bool = True) -> Work:
        """Return a handle whose `wait` polls."""
        known = FaultDomain.known(self._group)  # asking the group takes 10 µs
        seconds = timeout_of(self._group) if known is None else known.seconds
        wait = partial(wait_work, work, self._poll, on_cpu=on_cpu, seconds=seconds)
        polled = PolledWork(work, wait, self._ended)
        for domain in self._domains:  # they keep it while the dispatcher has only its C++ part
            domain.log.works.append(polled)
        return polled

    def _ended(self, work: Work) -> None:
        for domain in self._domains:
            domain.log.works = [w for w in domain.log.works if w is not work]

    def returned(
        self, op: str, given: Sequence[Any], root: int, splits: Collection[int], work: Work | None
    ) -> Work | None:
        """Log a collective that a backend in C++ was given, and return the handle to use."""
        if op == "alltoall_base_" and len({*splits}) > 1:
            op = "an all_to_all of uneven parts"  # sizes differ between ranks
        if op == "_reduce_scatter_base_":
            op = "a reduce_scatter of Gloo"  # its handle is not done until it is waited for
        groups = [[a] if isinstance(a, Tensor) else a for a in given]
        lists = [g[0] if g and isinstance(g[0], list) else g for g in groups]
        self.sent(op, root, 0, lists)  # Gloo and NCCL do not compare the reduce op
        if work is None:  # NCCL returns none for a blocking collective
            return None
        device = next((t.device for g in lists for t in g), None) or message_device(self._group)
        return self.polled(work, on_cpu=waits_on_cpu(self._group, device))

    def watched(self, state: Any, run: Callable[[], bool]) -> bool:
        """Run a collective on shm in this thread; raise errors of other ranks that end it."""
        before, state.on_wait = state.on_wait, self._look
        self._next_look = 0.0
        try:
            ran = run()
        finally:
            state.on_wait = before
        if self._next_look:  # it took long, perhaps because of an error
            self._poll()
        return ran

    def _look(self) -> None:
        # The collective ends when ranks that are behind join it, which they do once this rank has
        # stated that it waits. Before, it can send nothing else.
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + error_channel.POLL_SECONDS
            for domain in list(_DOMAINS.values()):
                domain._advance(joins=False)
            for domain in self._domains:
                if domain.broken is not None:
                    domain.raise_deferred()


class LogMode(TorchDispatchMode):
    """Dispatch mode in which a hook's collectives, on any group, are observed."""

    # Collectives that a hook's callbacks issue later, on a backend's threads, are not logged:
    # `protocol.missing` then finds a number that no log has, and the group is broken.

    def __init__(self, domain: FaultDomain, poll: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._domain, self._poll = domain, poll
        self._observed: list[tuple[Operations, Any]] = []
        self._dispatches = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo's wrapper would take 7 µs of each operation of a hook

    def __enter__(self) -> LogMode:
        # the domain's own group may not be registered
        for group in {self._domain.group, *dist.distributed_c10d._world.pg_names}:
            if not isinstance(group, ProcessGroup):
                continue
            member = shm_backend_of(group)  # calls on shm groups may bypass the dispatcher
            if member is None:
                self._dispatches = True
            else:
                self._observed.append((member, member.observer))
                member.observer = self._observer(group)
        if self._dispatches:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        if self._dispatches:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for member, observer in reversed(self._observed):  # one member may be there twice
            member.observer = observer

    def _observer(self, group: ProcessGroup) -> Observer:
        return Observer(group, [self._domain], self._poll)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        at = next((i for i, a in enumerate(args) if isinstance(a, torch.ScriptObject)), None)
        if func.namespace != "c10d" or at is None:
            return result
        op, group = func._schema.name.removeprefix("c10d::"), ProcessGroup.unbox(args[at])
        if op in _POINT_TO_POINT or shm_backend_of(group) is not None:  # whose observer logs it
            return result
        values = list(result) if isinstance(result, tuple | list) else [result]
        place = next((i for i, v in enumerate(values) if isinstance(v, torch.ScriptObject)), None)
        work = None if place is None else Work.unbox(values[place])
        root = args[at + _ROOT_AFTER_GROUP[op]] if op in _ROOT_AFTER_GROUP else 0
        splits = (*args[at + 1], *args[at + 2]) if op == "alltoall_base_" else ()
        polled = self._observer(group).returned(op, args[:at], root, splits, work)
        if place is not None and polled is not None:
            values[place] = polled.boxed()
        return tuple(values) if isinstance(result, tuple | list) else values[0]


_POINT_TO_POINT = ("send", "recv", "recv_", "recv_any_source_")
_ROOT_AFTER_GROUP = {"broadcast_": 1, "reduce_": 2}
"""Position of the root among the arguments of PyTorch's operators, relative to the group."""
_OPERATORS = {
    ALL_GATHER_SINGLE: "_allgather_base_",
    ALL_TO_ALL_SINGLE: "alltoall_base_",
    REDUCE_SCATTER_SINGLE: "_reduce_scatter_base_",
}
"""Operators of methods of a group that do not have the method's name."""


def _observe(group: ProcessGroup, method: str, call: Callable[..., Work], *args: Any) -> Any:
    """Call a collective of `gradwire.collectives`, as the reducers' own ones are called."""
    # if an exception ended a backward here, it would meet a bucket that other ranks wait in. It may
    # be on another group than the reducers': a rank that waits in it must learn of their errors
    domains = _live(group)
    if not domains:
        return call(*args)
    poll, own = partial(poll_all, group), _DOMAINS.get(group)
    with (own or domains[0]).lock:
        for domain in domains:
            domain.before_others()
        if own is not None:
            own.has_collectives = True
            hook = own.hook_future
            # in backward, callbacks of a hook may still send: that must come first on all ranks
            in_backward = hook and torch._C._current_graph_task_id() != -1
            if hook and in_backward and (late := wait_future(hook, poll, own.seconds)):
                own.give_up(own.translate(late, "a communication hook"), late)
        if method in _POINT_TO_POINT:
            return call(*args)
        observer, member = Observer(group, domains, poll), shm_backend_of(group)
        if member is not None:
            before, member.observer = member.observer, observer
            try:
                return call(*args)
            finally:
                member.observer = before
        work, op = call(*args), _OPERATORS.get(method, f"{method}_")
        given = [a for a in args[:2] if isinstance(a, Tensor | list)]
        root = args[-1].rootRank if op in _ROOT_AFTER_GROUP else 0
        splits = (*args[2], *args[3]) if op == "alltoall_base_" else ()
        return observer.returned(op, given, root, splits, work)


OBSERVERS.append(_observe)


def _resynchronize_all() -> None:
    """Advance the resynchronizations of all groups of this process until all are done."""
    # Each advances by one step in turn: two ranks may begin with different groups and would
    # otherwise wait for each other.
    while True:
        unfinished = [d for d in list(_DOMAINS.values()) if d._advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)


LOST = (PeerLostError, CollectiveTimeoutError, BrokenGroupError)
"""Errors after which a group cannot be used again. After a mismatch it can."""


def wait_for_message(
    group: ProcessGroup,
    work: Work,
    what: str,
    *,
    on_cpu: bool,
    since: float | None = None,
    from_all: bool = False,
) -> None:
    """Wait for a message; if the group fails, mark it as broken and report that to other ranks."""
    # If it is not `on_cpu`, the current stream waits. A message `from_all` needs data from all
    # ranks: a rank that has ended is lost. The root of a broadcast may end before other ranks have
    # received.
    domain = FaultDomain.known(group)
    since = time.monotonic() if since is None else since
    if domain is None:  # no reducer on this group: there are no error reports
        with backend_errors(group, what, since):
            work.wait()
        return
    poll = partial(domain.poll_lost, look=from_all)
    try:
        with backend_errors(group, what, since):
            if error := wait_work(work, poll, on_cpu=on_cpu, seconds=domain.seconds):
                raise domain.cause(error)
    except LOST as failure:
        if domain.broken is None:
            domain.give_up(failure, failure.__cause__)
        raise
