"""The sum over ranks of sparse gradients: what each rank has, end to end, and added up alike.

Ranks tell each other how many entries they have, then exchange indices and values, padded to the
longest. Every rank adds them up in rank order, so that all get the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

__all__ = ["SparseSum"]


class SparseSum:
    """One sparse COO tensor on its way: `counting`, then `exchange`, then `result`.

    Args:
        tensor: Coalesced or not; the same shape, dtype and number of sparse dimensions on every
            rank. Sent: 8 bytes, then N bytes for the longest rank's N bytes of indices and values.
        group: The process group.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     rank = dist.get_rank()
        ...     own = torch.sparse_coo_tensor([[rank]], [1.0], (3,))
        ...     total = SparseSum(own, dist.group.WORLD)
        ...     total.counting.wait()
        ...     for work in total.exchange():
        ...         work.wait()
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
        self.counting = _all_gather(self._counts, count, group)

    def exchange(self) -> list[Work]:
        """Send indices and values; to be called when `counting` has ended."""
        self._lengths = [int(c) for c in self._counts]
        longest = max(self._lengths)
        self._indices = self._gathered(self._own.indices().t(), longest)
        self._values = self._gathered(self._own.values(), longest)
        if not longest:
            return []
        return [
            _all_gather(received, received[self._group.rank()].clone(), self._group)
            for received in (self._indices, self._values)
        ]

    def _gathered(self, own: Tensor, longest: int) -> list[Tensor]:
        """Space for every rank's entries, as bytes; this rank's own are in their place."""
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        wire = padded.reshape(-1).view(torch.uint8)
        return [
            wire if rank == self._group.rank() else torch.empty_like(wire)
            for rank in range(self._group.size())
        ]

    def result(self) -> Tensor:
        """The sum, coalesced; to be called when what `exchange` returned has ended."""
        indices = self._joined(self._indices, self._own.indices().t())
        values = self._joined(self._values, self._own.values())
        total = torch.sparse_coo_tensor(
            indices.t(), values, self._own.shape, check_invariants=False
        )
        return total.coalesce()

    def _joined(self, received: list[Tensor], like: Tensor) -> Tensor:
        rest = like.shape[1:]
        parts = [
            wire.view(like.dtype).view(-1, *rest)[:length] if length else like.new_empty((0, *rest))
            for wire, length in zip(received, self._lengths, strict=True)
        ]
        return torch.cat(parts)


def _all_gather(received: list[Tensor], own: Tensor, group: ProcessGroup) -> Work:
    work = dist.all_gather(received, own, group=group, async_op=True)
    assert isinstance(work, Work)
    return work
