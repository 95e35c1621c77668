"""Matrices of gradients as products of two thin ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.buckets import memory_strides
from gradwire.cost_model import Message
from gradwire.errors import ArgumentError
from gradwire.hooks.compression.chain import chain
from gradwire.hooks.compression.compressor import Compressor, Reduction
from gradwire.hooks.compression.orthogonal import orthonormal, random_basis, renewed

__all__ = ["LowRank"]


@dataclass
class _Matrix:
    """A parameter's part of what is sent, as a matrix (n, m), and its factors (n, r), (m, r)."""

    name: str
    value: Tensor
    left: Tensor
    right: Tensor


class LowRank(Compressor):
    """Average an approximation of low rank: of a matrix (n, m), r (n + m) numbers.

    Each step is one step of a power iteration that goes on where the last one ended: P = M Q,
    averaged and made orthonormal, then Q = Mᵀ P, averaged; the mean is P Qᵀ. Two all_reduces a
    bucket; what is not compressed travels with the first. A gradient of more than two dims is the
    matrix of its first by all others. A NaN or an infinity makes all that is compressed with it not
    finite, on every rank; then nothing is kept of that step.

    All ranks compute P Qᵀ from the same bits; they get the same if they have the same kind of
    processor and number of threads.

    Args:
        rank: The rank of approximations, at least 1.
        min_saving: What is not made smaller by this factor is sent as it is; so are 1-d tensors.
        seed: Of the first Q.
        group: The group; None: the default one.
        start: How many steps are averaged without compression, before the first with it.

    Raises:
        ArgumentError: `rank` or `min_saving` is less than 1.

    Example:
        A gradient of rank 1 arrives whole:

        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
        ...     net.register_comm_hook(None, LowRank(1))
        ...     net(torch.ones(1, 8) * dist.get_rank()).sum().backward()
        ...     return net.module.weight.grad.mean().round(decimals=4).item()
        >>> run_ranks(main, world_size=2)
        [0.5, 0.5]

    Source:
        PowerSGD, T. Vogels et al., arXiv 1905.13727.
    """

    def __init__(
        self,
        rank: int = 4,
        *,
        min_saving: float = 2.0,
        seed: int = 0,
        group: ProcessGroup | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(group, start=start)
        if rank < 1:
            raise ArgumentError(f"rank is {rank}: give at least 1")
        if min_saving < 1:
            raise ArgumentError(f"min_saving is {min_saving}: give a factor of at least 1")
        self.rank, self.min_saving, self.seed = rank, min_saving, seed

    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """P and what stays as it is, by one all_reduce; then Q by another."""
        wire = reduction.wire
        cut = _Cut(self, reduction)
        for matrix in cut.matrices:
            torch.mm(matrix.value, self._basis(matrix, reduction, step), out=matrix.left)
        if not cut.matrices:
            return chain(cut.first.device, wire.all_reduce(cut.first), lambda _: cut.finish())

        def multiply_back(_: Tensor) -> torch._C.Future[Tensor]:
            for matrix in cut.matrices:
                matrix.left = orthonormal(matrix.left)
                torch.mm(matrix.value.t(), matrix.left, out=matrix.right)
            # what this rank has sent is its own Q, which the sum overwrites
            own = [matrix.right.clone() for matrix in cut.matrices]
            summing = wire.all_reduce(cut.second)
            for matrix, right in zip(cut.matrices, own, strict=True):
                matrix.value.addmm_(matrix.left, right.t(), alpha=-1)
            return summing

        whole = wire.all_reduce(cut.first)
        return chain(cut.first.device, whole, multiply_back, lambda _: cut.finish())

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """All P with what is not compressed, then all Q."""
        left = right = 0
        for parameter in parameters:
            numel = parameter.numel() * (2 if parameter.is_complex() else 1)
            rows = _rows(parameter)
            rank = self.fits(rows, numel // rows) if numel else 0
            left += rank * rows or numel
            right += rank * numel // rows if rank else 0
        itemsize = self.extent(parameters)[1]
        sizes = [left, right] if right else [left]
        return [Message("all_reduce", size * itemsize) for size in sizes]

    def _basis(self, matrix: _Matrix, reduction: Reduction, step: int) -> Tensor:
        """Q as the step before left it, orthonormal; random where that has found nothing."""
        seed = self.seed + zlib.crc32(f"{matrix.name} {step}".encode())
        kept = reduction.state.bases.get(matrix.name)
        if kept is None or kept.shape != matrix.right.shape:
            return orthonormal(random_basis(matrix.right, seed))
        return orthonormal(renewed(kept.to(matrix.right), seed))

    def fits(self, rows: int, columns: int) -> int:
        """The rank by which a matrix is approximated; 0: it is sent as it is."""
        rank = min(self.rank, rows, columns)
        return rank if rows * columns >= self.min_saving * rank * (rows + columns) else 0


class _Cut:
    """A bucket, cut into matrices that are compressed and pieces that are not.

    Attributes:
        matrices: What is compressed.
        first: All P, then the pieces: what the first all_reduce sums.
        second: All Q.
    """

    def __init__(self, hook: LowRank, reduction: Reduction) -> None:
        self._reduction, self.matrices = reduction, list[_Matrix]()
        self._pieces: list[Tensor] = []
        bucket, sent = reduction.bucket, reduction.sent
        found: list[tuple[str, Tensor, int]] = []
        at = 0
        for name, parameter in zip(bucket.names(), bucket.parameters(), strict=True):
            piece = sent[at : at + parameter.numel()]
            rows, at = _rows(parameter), at + parameter.numel()
            if rank := hook.fits(rows, piece.numel() // rows) if len(piece) else 0:
                found.append((name, piece.view(rows, -1), rank))
            else:
                self._pieces.append(piece)
        self._pieces.append(sent[at:])
        self._compressed = sum(rank * len(value) for _, value, rank in found)
        self.first = torch.cat([sent.new_empty(self._compressed), *self._pieces])
        self.second = sent.new_empty(sum(rank * value.shape[1] for _, value, rank in found))
        left = right = 0
        for name, value, rank in found:
            rows, columns = value.shape
            p = self.first[left : left + rows * rank].view(rows, rank)
            q = self.second[right : right + columns * rank].view(columns, rank)
            self.matrices.append(_Matrix(name, value, p, q))
            left, right = left + rows * rank, right + columns * rank

    def finish(self) -> Tensor:
        """P Qᵀ and the pieces' mean in their places; matrices hold what was not sent."""
        size, error = self._reduction.wire.size, self._reduction.sent
        mean = torch.empty_like(error)
        self.second.div_(size)
        for matrix in self.matrices:
            torch.mm(matrix.left, matrix.right.t(), out=_like(mean, error, matrix.value))
        at = self._compressed
        for piece in self._pieces:
            end = at + len(piece)
            torch.div(self.first[at:end], size, out=_like(mean, error, piece))
            piece.zero_()
            at = end
        bases = {matrix.name: matrix.right for matrix in self.matrices}
        return self._reduction.finish(mean, error, bases=bases)


def _rows(parameter: Tensor) -> int:
    """The size of the dim that lies outermost in memory: any other order permutes columns."""
    strides = memory_strides(parameter)
    if parameter.dim() < 2 or strides is None:
        return parameter.shape[0] if parameter.dim() else 1
    outermost = max(range(parameter.dim()), key=lambda d: (strides[d], parameter.shape[d]))
    return parameter.shape[outermost]


def _like(mean: Tensor, error: Tensor, part: Tensor) -> Tensor:
    """The elements of one flat tensor where the other has this part."""
    at = part.storage_offset() - error.storage_offset()
    return mean[at : at + part.numel()].view(part.shape)
