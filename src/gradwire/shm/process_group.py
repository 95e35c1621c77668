"""torch.distributed's face of a team: its methods, options, handles and names.

C++ callers (DistributedDataParallel's reducer, functional collectives) and Python callers reach
different methods for the same thing, and older versions of torch have other names for some, so
that several names stand for one method here.
"""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    DistributedError,
    MismatchError,
    NotSupportedError,
)
from gradwire.shm import algorithms
from gradwire.shm.arithmetic import check_reduction, number_of
from gradwire.shm.header import Call
from gradwire.shm.links import Message
from gradwire.shm.mailbox import Mailbox, send
from gradwire.shm.sync import Deadline
from gradwire.shm.team import Team
from gradwire.shm.tensors import check_tensors, flat_of, one, put_back, row_counts, start_of
from gradwire.shm.work import Queue, ShmWork

__all__ = ["ShmProcessGroup"]

Job = Callable[[Deadline], None]
Observer = Callable[[str, int, Sequence[Sequence[Tensor]]], None]
"""Told of each collective as it is submitted: its name among torch's operators, its root, and the
tensors; what torch's dispatcher does for groups that are written in C++."""


class ShmProcessGroup(ProcessGroup):
    """The ranks of one host, over shared memory.

    Args:
        rank: This rank.
        size: How many ranks.
        peers: A connection to each other rank.
        timeout: For each operation that has none of its own.

    Attributes:
        observer: Told of each collective as it is submitted, if there is one.
    """

    def __init__(self, rank: int, size: int, peers: dict[int, Any], timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._names = {"name": "", "desc": ""}
        self._timeout = timeout
        self._broken: BaseException | None = None
        self._closed = False
        self._mailbox = Mailbox()
        self._team = Team(
            rank, size, peers, self._deliver, self._on_lost, Deadline(timeout.total_seconds())
        )
        self._queue = Queue(f"gradwire-shm-{rank}")
        self.observer: Observer | None = None
        self._submitted = 0

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

    # --- reductions ---

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Every rank's tensor becomes the reduction over all ranks."""
        return self._reduce("all_reduce", tensors, opts or AllreduceOptions())

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> Work:
        """`allreduce` of several tensors, as one operation."""
        return self._reduce("all_reduce", tensors, opts or AllreduceCoalescedOptions())

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions | None = None) -> Work:
        """The root's tensor becomes the reduction; the others' stay as they are."""
        opts = opts or ReduceOptions()
        return self._reduce("reduce", tensors, opts, self._root(opts))

    def _reduce(self, kind: str, tensors: list[Tensor], opts: Any, root: int = -1) -> Work:
        op = number_of(opts.reduceOp.op)
        check_tensors(tensors)
        for tensor in tensors:
            check_reduction(op, tensor.dtype)

        def job(deadline: Deadline) -> None:
            for tensor in tensors:
                flat = flat_of(tensor)
                call = Call(kind, flat.dtype, flat.numel(), op, root)
                algorithms.reduce(self._team, call, flat, deadline)
                if root in (-1, self._rank):
                    put_back(tensor, flat)

        seen = ("allreduce_" if root < 0 else "reduce_", max(root, 0), [tensors])
        return self._submit(job, tensors, opts, seen)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """A rank's output becomes the reduction of what all ranks have for it in their list."""
        opts = opts or ReduceScatterOptions()
        output, blocks = one(outputs), self._one_each(one(inputs), "input_list")
        op = self._check_reduce_scatter(output, blocks, opts)
        sends = tuple(block.numel() for block in blocks)

        def job(deadline: Deadline) -> None:
            out, flats = flat_of(output), [flat_of(block) for block in blocks]
            call = Call("reduce_scatter", out.dtype, 0, op, -1, sends, (out.numel(),) * self._size)
            base = start_of(flats)
            algorithms.reduce_scatter(self._team, call, flats, out, deadline, base=base)
            put_back(output, out)

        return self._submit(job, outputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        """`reduce_scatter` of a tensor whose equal parts are the blocks."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """`reduce_scatter_single` of several tensors, as one operation."""
        opts = opts or ReduceScatterOptions()
        for output, source in zip(outputs, inputs, strict=True):
            op = self._check_reduce_scatter(output, [source], opts)
            self._check_parts(whole=source, part=output)

        def job(deadline: Deadline) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                out, flat = flat_of(output), flat_of(source)
                call = Call("reduce_scatter_single", out.dtype, out.numel(), op)
                blocks = _parts(flat, self._size)
                algorithms.reduce_scatter(self._team, call, blocks, out, deadline, base=flat)
                put_back(output, out)

        return self._submit(job, outputs, opts)

    def _check_reduce_scatter(self, output: Tensor, blocks: list[Tensor], opts: Any) -> int:
        op = number_of(opts.reduceOp.op)
        check_tensors([output, *blocks], same_dtype=True)
        check_reduction(op, output.dtype)
        return op

    # --- movement ---

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions | None = None) -> Work:
        """Every rank's tensor becomes the root's."""
        opts = opts or BroadcastOptions()
        root = self._root(opts)
        check_tensors(tensors)

        def job(deadline: Deadline) -> None:
            for tensor in tensors:
                flat = flat_of(tensor)
                call = Call("broadcast", flat.dtype, flat.numel(), -1, root)
                incoming: list[Tensor | None] = [None] * self._size
                outgoing = [flat] if root == self._rank else []
                if not outgoing:
                    incoming[root] = flat
                algorithms.exchange(
                    self._team, call, outgoing, incoming, deadline, base=flat, shared=True
                )
                if not outgoing:
                    put_back(tensor, flat)

        return self._submit(job, tensors, opts, ("broadcast_", root, [tensors]))

    def allgather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Every rank's list becomes all ranks' tensors; these may differ in size."""
        return self.allgather_coalesced(outputs, inputs, opts)

    def allgather_coalesced(
        self,
        output_lists: list[list[Tensor]],
        inputs: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """`allgather` of several tensors, as one operation."""
        for outputs, source in zip(output_lists, inputs, strict=True):
            check_tensors([source, *self._one_each(outputs, "tensor_list")], same_dtype=True)

        def job(deadline: Deadline) -> None:
            for outputs, source in zip(output_lists, inputs, strict=True):
                flat, into = flat_of(source), [flat_of(output) for output in outputs]
                call = Call(
                    "all_gather",
                    flat.dtype,
                    sends=(flat.numel(),) * self._size,
                    receives=tuple(f.numel() for f in into),
                )
                algorithms.exchange(
                    self._team, call, [flat], into, deadline, base=flat, shared=True
                )
                _put_all_back(outputs, into)

        everything = [output for outputs in output_lists for output in outputs]
        seen = ("allgather_", 0, [everything, inputs])
        return self._submit(job, everything, opts or AllgatherOptions(), seen)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """`allgather` into the equal parts of one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """`all_gather_single` of several tensors, as one operation."""
        for output, source in zip(outputs, inputs, strict=True):
            check_tensors([source, output], same_dtype=True)
            self._check_parts(whole=output, part=source)

        def job(deadline: Deadline) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                flat, into = flat_of(source), flat_of(output)
                call = Call("all_gather_single", flat.dtype, flat.numel())
                parts = _parts(into, self._size)
                algorithms.exchange(
                    self._team, call, [flat], parts, deadline, base=flat, shared=True
                )
                put_back(output, into)

        return self._submit(job, outputs, opts or AllgatherOptions())

    def gather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: GatherOptions | None = None,
    ) -> Work:
        """The root's list becomes all ranks' tensors; these may differ in size."""
        opts = opts or GatherOptions()
        root, source = self._root(opts), one(inputs)
        into = self._one_each(one(outputs), "gather_list") if root == self._rank else []
        check_tensors([source, *into], same_dtype=True)

        def job(deadline: Deadline) -> None:
            flat, flats = flat_of(source), [flat_of(output) for output in into]
            outgoing = [flat[:0]] * self._size
            outgoing[root] = flat
            incoming = flats or [flat[:0]] * self._size
            self._exchange("gather", outgoing, incoming, deadline, root=root, base=flat)
            _put_all_back(into, flats)

        return self._submit(job, into, opts)

    def scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: ScatterOptions | None = None,
    ) -> Work:
        """Every rank's tensor becomes its entry of the root's list; these may differ in size."""
        opts = opts or ScatterOptions()
        root, output = self._root(opts), one(outputs)
        blocks = self._one_each(one(inputs), "scatter_list") if root == self._rank else []
        check_tensors([output, *blocks], same_dtype=True)

        def job(deadline: Deadline) -> None:
            out = flat_of(output)
            outgoing = [flat_of(b) for b in blocks] or [out[:0]] * self._size
            incoming = [out[:0]] * self._size
            incoming[root] = out
            self._exchange("scatter", outgoing, incoming, deadline, root=root)
            put_back(output, out)

        return self._submit(job, outputs, opts)

    def alltoall(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Entry i of a rank's outputs becomes what rank i has for it; sizes may differ."""
        self._one_each(outputs, "output_tensor_list")
        self._one_each(inputs, "input_tensor_list")
        check_tensors([*outputs, *inputs], same_dtype=True)

        def job(deadline: Deadline) -> None:
            into = [flat_of(output) for output in outputs]
            self._exchange("all_to_all", [flat_of(i) for i in inputs], into, deadline)
            _put_all_back(outputs, into)

        return self._submit(job, outputs, opts or AllToAllOptions())

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """`alltoall` between the parts of two tensors, equal or of the given numbers of rows."""
        check_tensors([output, input], same_dtype=True)
        receives = row_counts(output, output_split_sizes, self._size, "output_split_sizes")
        sends = row_counts(input, input_split_sizes, self._size, "input_split_sizes")

        def job(deadline: Deadline) -> None:
            out, flat = flat_of(output), flat_of(input)
            blocks, into = list(flat.split(sends)), list(out.split(receives))
            self._exchange("all_to_all", blocks, into, deadline, base=flat)
            put_back(output, out)

        return self._submit(job, [output], opts or AllToAllOptions())

    def _exchange(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        deadline: Deadline,
        *,
        root: int = -1,
        base: Tensor | None = None,
    ) -> None:
        call = Call(
            kind,
            incoming[0].dtype,
            root=root,
            sends=tuple(block.numel() for block in outgoing),
            receives=tuple(block.numel() for block in incoming),
        )
        base = start_of(outgoing) if base is None else base
        algorithms.exchange(self._team, call, outgoing, incoming, deadline, base=base)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Done when every rank has called it."""
        return self._submit(
            lambda deadline: algorithms.barrier(self._team, deadline), [], opts or BarrierOptions()
        )

    # --- point to point ---

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor; it can be changed at once."""
        self._check_usable()
        self._check_peer(dst, "dst")
        check_tensors(tensors)
        deadline = Deadline(self._timeout.total_seconds())
        send(self._team.links, dst, tag, flat_of(one(tensors)), deadline)
        work = ShmWork(tensors)
        work.finish()
        return work

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next that rank `src` sends with this tag."""
        self._check_peer(src, "src")
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next that any rank sends with this tag."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        self._check_usable()
        check_tensors(tensors)
        links, mailbox = self._team.links, self._mailbox

        def forget() -> None:
            with links.changed:
                mailbox.forget(work)

        work = ShmWork(tensors, self._timeout.total_seconds(), forget)
        with links.changed:
            if not mailbox.want(src, tag, one(tensors).detach(), work):
                if src is not None and src in links.lost:
                    mailbox.fail(src, links.lost[src], others_left=True)
                elif links.lost and links.all_lost():
                    mailbox.fail(-1, next(iter(links.lost.values())), others_left=False)
        return work

    def _deliver(self, peer: int, message: Message) -> None:
        self._mailbox.deliver(peer, message)

    def _on_lost(self, peer: int, error: DistributedError) -> None:
        self._mailbox.fail(peer, error, others_left=not self._team.links.all_lost())

    # --- its end ---

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        if not self._closed:
            self._closed = True
            self._queue.close()
            self._team.close()

    def abort(self) -> None:
        """Leave the group without waiting for operations in flight; they fail."""
        self._break(BrokenGroupError("the group was aborted on this rank"))

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
        own = opts.timeout.total_seconds()
        seconds = own if own > 0 else self._timeout.total_seconds()

        def guarded() -> None:
            self._check_usable()
            try:
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
            raise BrokenGroupError("the group was destroyed on this rank: make a new one")
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

    # the names of torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _parts(flat: Tensor, size: int) -> list[Tensor]:
    return list(flat.view(size, -1).unbind(0))


def _put_all_back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    for tensor, flat in zip(tensors, flats, strict=True):
        put_back(tensor, flat)
