"""The mean over ranks by one all_reduce, as without a hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.result import after, as_future
from gradwire.hooks.sparse import SparseSum

__all__ = ["all_reduce"]


def all_reduce(group: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks with one all_reduce; state is the process group.

    Args:
        group: The process group; None means the default one.
        bucket: The local gradients; the buffer is overwritten. Sent: its N bytes.

    Returns:
        A future of the buffer with (Σ over ranks) / W.

    Example:
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     net.register_comm_hook(None, all_reduce)
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     return net.module.weight.grad.item()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2 on both ranks
        [1.5, 1.5]
    """
    group = group or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return _all_reduce_sparse(group, buffer)
    buffer.div_(group.size())
    wire = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return after(dist.all_reduce(wire, group=group, async_op=True), lambda: buffer)


def _all_reduce_sparse(group: ProcessGroup, gradient: Tensor) -> torch.futures.Future[Tensor]:
    total = SparseSum(gradient / group.size(), group)
    total.counting.wait()
    work = total.exchange()
    if work is None:
        return as_future(total.result(), all_reduce)  # type: ignore[return-value]
    return after(work, total.result)


all_reduce.single_collective = all_reduce.takes_group = True  # type: ignore[attr-defined]
all_reduce.linear = True  # type: ignore[attr-defined]
