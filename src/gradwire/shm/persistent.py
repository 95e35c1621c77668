"""An all_reduce that is prepared once and run many times, as MPI's persistent collectives are."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from gradwire._torch import outside_graphs
from gradwire.errors import ArgumentError, ArgumentTypeError, DistributedError
from gradwire.shm.arithmetic import check_reduction, number_of
from gradwire.shm.hierarchy.group import AcrossHostsOperations
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
        self._tensor, self._op, self._group, self._member = tensor, op, group, member
        self._prepared = (
            None if member is None else member.prepare_all_reduce(tensor, number_of(op))
        )
        self._work: Work | None = None
        self._started = False

    def start(self) -> None:
        """Begin: the tensor's values at this moment count, or those at `wait` if it is short.

        Raises:
            DistributedError: It was begun already.
        """
        if self._started:
            raise DistributedError("the all_reduce was started already: call wait() first")
        self._started = True
        if self._member is None or self._prepared is None:
            self._work = dist.all_reduce(self._tensor, self._op, self._group, async_op=True)
        else:
            self._member.start(self._prepared)

    def wait(self) -> None:
        """Wait until the tensor holds the reduction.

        Raises:
            DistributedError: It was not begun, or failed; as `torch.distributed.all_reduce` raises.
        """
        if not self._started:
            raise DistributedError("the all_reduce was not started: call start() first")
        self._started = False
        if self._member is not None and self._prepared is not None:
            self._member.finish(self._prepared)
        elif self._work is not None:
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
    check_results([tensor])
    check_reduction(number_of(op), tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}: pass one that "
            "is contiguous, for instance its contiguous()"
        )
    member = member_of(group)
    if isinstance(member, AcrossHostsOperations):
        member = None  # messages take its time: there is nothing to prepare
    return PersistentAllReduce(tensor, op, group, member)
