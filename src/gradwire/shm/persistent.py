"""An all_reduce that is prepared once and run many times, as MPI's persistent collectives are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from gradwire._torch import is_done, outside_graphs
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
)
from gradwire.shm.arithmetic import check_reduction, number_of
from gradwire.shm.hierarchy.group import AcrossHostsOperations
from gradwire.shm.operation_queue import Prepared, Stage
from gradwire.shm.process_group import Operations
from gradwire.shm.register import member_of
from gradwire.shm.tensors import check_results

__all__ = ["PersistentAllReduce", "all_reduce_init"]


@outside_graphs
class PersistentAllReduce:
    """What `all_reduce_init` returns; each `start` takes one `wait`.

    Other operations of the group may be called in between, by all ranks in the same order.
    """

    def __init__(
        self, tensor: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup, member: Operations | None
    ) -> None:
        self._tensor, self._op, self._group = tensor, op, group
        self._begin: Callable[[], None] = self._by_work
        self._end: Callable[[], None] = self._wait_for_work
        self._member = member
        self._prepared: Prepared | None = None
        self._work: Work | None = None
        self._started = False
        self._memory = _memory_of(tensor)
        self._prepare()

    def _prepare(self) -> None:
        if (member := self._member) is not None:
            self._memory = _memory_of(self._tensor)
            self._prepared = prepared = member.prepare_all_reduce(self._tensor, number_of(self._op))
            self._begin = partial(member.start, prepared)
            self._end = partial(member.finish, prepared)
            self._started = False

    def start(self) -> None:
        """Begin: the tensor is not to be written to until `wait`; other ranks wait for no more.

        Raises:
            DistributedError: It was begun already.
            ArgumentError: The tensor has changed, and is not contiguous any more.
        """
        member, prepared = self._member, self._prepared
        if member and prepared and not member.is_current(prepared):
            self._prepare()  # for other members: the group was formed again
        if self._started:
            if member is not None:
                member.check_usable()
            raise DistributedError("the all_reduce was started already: call wait() first")
        if self._prepared is not None and self._memory != _memory_of(self._tensor):
            _check(self._tensor, self._op)  # it has other memory, as by `x.data = y`
            self._prepare()
        if self._prepared is not None:
            self._prepared.stage = Stage.IDLE  # first: an exception may leave it as it is
        self._started = True
        try:
            self._begin()
        except BaseException:
            self._started = self._prepared is not None and self._prepared.stage is not Stage.IDLE
            raise

    def wait(self) -> None:
        """Wait until the tensor holds the reduction.

        Raises:
            DistributedError: It was not begun, or failed; as `torch.distributed.all_reduce` raises.
        """
        if not self._started:
            raise DistributedError("the all_reduce was not started: call start() first")
        try:
            self._end()
        except BaseException:
            # where a signal's handler has raised, it may go on, and can be waited for again
            if self._prepared is not None:
                self._started = self._prepared.stage is not Stage.REFUSED
            else:
                self._started = self._work is not None and not is_done(self._work)
            raise
        self._started = False

    def _by_work(self) -> None:
        self._work = dist.all_reduce(self._tensor, self._op, self._group, async_op=True)

    def _wait_for_work(self) -> None:
        if self._work is not None:
            self._work.wait()

    def __repr__(self) -> str:
        kind = "started" if self._started else "ready"
        return f"{type(self).__name__}({tuple(self._tensor.shape)}, {self._op.name}, {kind})"


def all_reduce_init(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> PersistentAllReduce:
    """Prepare an all_reduce of one tensor, to be run any number of times by `start` and `wait`.

    What can be done once is: checks, and where the data goes. It fits an ordinary all_reduce of the
    same tensor on other ranks, and runs on any group; on other backends than shm, and over several
    hosts, it is as fast as `torch.distributed.all_reduce`. Not differentiable.

    Args:
        tensor: Contiguous; its memory is used at each `start`.
        op: The reduce op.
        group: The default group if None.

    Raises:
        ArgumentTypeError: No tensor, no reduce op, or `group` is no process group.
        ArgumentError: Not contiguous, or of a dtype that cannot be reduced so.

    Example:
        >>> import torch, torch.distributed as dist, gradwire.shm
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     x = torch.empty(2)
        ...     total = gradwire.shm.all_reduce_init(x)
        ...     for step in range(2):
        ...         x.fill_(dist.get_rank() + step)  # [0, 0] and [1, 1]; then [1, 1] and [2, 2]
        ...         total.start()
        ...         total.wait()
        ...     return x.tolist()
        >>> run_ranks(main, world_size=2, backend="shm")
        [[3.0, 3.0], [3.0, 3.0]]

    Source:
        MPI: A Message-Passing Interface Standard, version 4.0, 2021, section 6.13.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise ArgumentTypeError(
            f"group is {group!r}: pass a ProcessGroup that this rank is a member of, or call "
            "init_process_group first"
        )
    if not isinstance(op, ReduceOp.RedOpType):
        raise ArgumentTypeError(f"op is {op!r}: pass a reduce op, such as ReduceOp.SUM")
    _check(tensor, op)
    member = member_of(group)
    if isinstance(member, AcrossHostsOperations):
        member = None  # messages take its time: there is nothing to prepare
    return PersistentAllReduce(tensor, op, group, member)


def _check(tensor: Tensor, op: ReduceOp.RedOpType) -> None:
    check_results([tensor])
    check_reduction(number_of(op), tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}: pass one that "
            "is contiguous, for instance its contiguous()"
        )


def _memory_of(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
