"""The mean over ranks: one all_reduce for dense gradients, a gather of entries for sparse ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.result import after, as_future


def all_reduce(group: ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks with one all_reduce; the state is the process group.

    Args:
        group: Process group; None for the default group.
        bucket: Local gradients of N bytes. The buffer is overwritten. The all_reduce sends N bytes.

    Returns:
        Future of the buffer with (Σ over ranks) / W.

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
    work = dist.all_reduce(wire, group=group, async_op=True)
    return after(work, lambda: buffer, buffer.device)


all_reduce.single_collective = all_reduce.takes_group = True  # type: ignore[attr-defined]
all_reduce.linear = True  # type: ignore[attr-defined]


def _all_reduce_sparse(group: ProcessGroup, gradient: Tensor) -> torch.futures.Future[Tensor]:
    total = SparseSum(gradient / group.size(), group)
    total.counting.wait()
    work = total.exchange()
    if work is None:
        return as_future(total.result(), all_reduce)  # type: ignore[return-value]
    return after(work, total.result, gradient.device)


class SparseSum:
    """Sum over ranks of a sparse COO tensor, in three steps: `counting`, `exchange`, `result`.

    Only Gloo sums sparse tensors, and not in every dtype. So ranks exchange their numbers of
    entries, then indices and values as bytes, padded to the longest. Every rank sums them in rank
    order, so that all ranks get the same bits.

    Args:
        tensor: Tensor, coalesced or not, with the same shape, dtype and number of sparse dimensions
            on every rank. Each rank sends 8 bytes, then as many bytes as the longest rank's indices
            and values have.
        group: Process group.

    Attributes:
        counting: Exchange of the numbers of entries, started by the constructor.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     rank = dist.get_rank()
        ...     own = torch.sparse_coo_tensor([[rank]], [1.0], (3,))
        ...     total = SparseSum(own, dist.group.WORLD)
        ...     total.counting.wait()
        ...     total.exchange().wait()
        ...     return total.result().to_dense().tolist()
        >>> run_ranks(main, world_size=2)
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._group = group
        self._own = tensor.coalesce()
        device = tensor.device
        count = torch.tensor([self._own._nnz()], dtype=torch.int64, device=device)
        self._counts = [torch.empty_like(count) for _ in range(group.size())]
        self._received: list[Tensor] = []
        self.counting = _all_gather(self._counts, count, group)

    def exchange(self) -> Work | None:
        """Send indices and values. Call this when `counting` has ended."""
        self._lengths = [int(c) for c in self._counts]
        size = max(self._lengths) * self._entry_bytes()
        if not size:
            return None
        wire = torch.zeros(size, dtype=torch.uint8, device=self._own.device)
        at = 0
        for part in (self._own.indices().t(), self._own.values()):
            flat = part.reshape(-1).clone(memory_format=torch.contiguous_format)
            wire[at : at + part.nbytes] = flat.view(torch.uint8)
            at += part.nbytes
        self._received = [torch.empty_like(wire) for _ in range(self._group.size())]
        return _all_gather(self._received, wire, self._group)

    def _entry_bytes(self) -> int:
        values = self._own.values()
        return 8 * self._own.sparse_dim() + values.element_size() * values[:1].shape[1:].numel()

    def result(self) -> Tensor:
        """Return the coalesced sum. Call this when the work returned by `exchange` has ended."""
        own, indices, values = self._own, [], []
        for wire, length in zip(self._received, self._lengths, strict=False):
            cut = 8 * own.sparse_dim() * length
            end = self._entry_bytes() * length
            indices.append(wire[:cut].view(torch.int64).view(length, own.sparse_dim()))
            values.append(
                wire[cut:end].clone().view(own.dtype).view(length, *own.values().shape[1:])
            )
        if not indices:
            return own
        total = torch.sparse_coo_tensor(
            torch.cat(indices).t(), torch.cat(values), own.shape, check_invariants=False
        )
        return total.coalesce()


def _all_gather(received: list[Tensor], own: Tensor, group: ProcessGroup) -> Work:
    work = dist.all_gather(received, own, group=group, async_op=True)
    assert isinstance(work, Work)
    return work
