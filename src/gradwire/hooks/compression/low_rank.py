"""Low-rank approximation of gradients: matrices as products of two thin factors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.buckets import memory_strides
from gradwire.errors import ArgumentError
from gradwire.hooks.compression.compressor import Compressor, Reduction
from gradwire.hooks.compression.wire import Message
from gradwire.hooks.result import chain


@dataclass
class _Batch:
    """Matrices (n, m) of one shape, and their factors, each in one tensor.

    The factors are transposed, Pᵀ (k, r, n) and Qᵀ (k, r, m), which halves the time of products.
    """

    names: list[str]
    values: list[Tensor]
    left: Tensor
    right: Tensor


class LowRank(Compressor):
    """Average a low-rank approximation: r (n + m) numbers for a matrix (n, m).

    Each training step is one step of a power iteration: P = M Q is averaged and orthonormalized,
    then Q = Mᵀ P is averaged. The mean is approximated by P Qᵀ, and Q is kept for the next step.
    There are two all_reduces per bucket; gradients that are not compressed are part of the first. A
    gradient of more than two dims is a matrix of its first dim by all others. A NaN or an infinity
    makes its whole matrix NaN or infinite on every rank; the state of that step is then not kept.

    All ranks compute P Qᵀ from the same bits. The results are equal if the ranks have the same kind
    of processor and the same number of threads.

    Args:
        rank: Rank r of approximations, at least 1.
        min_saving: Minimum factor by which compression reduces a gradient's size. Other gradients,
            and 1-d ones, are sent without compression.
        seed: Seed of the first Q.
        group: Process group; None for the group of the module that the hook is registered for.
        start: Number of first steps without compression.

    Raises:
        ArgumentError: `rank` or `min_saving` is less than 1.

    Example:
        A gradient of rank 1 is averaged without error:

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
            raise ArgumentError(f"rank is {rank}: pass at least 1")
        if min_saving < 1:
            raise ArgumentError(f"min_saving is {min_saving}: pass a factor of at least 1")
        self.rank, self.min_saving, self.seed = rank, min_saving, seed

    def reduce(self, reduction: Reduction, step: int) -> torch._C.Future[Any]:
        """Sum P and the uncompressed gradients in one all_reduce, then Q in another."""
        wire = reduction.wire
        cut = _Cut(self, reduction)
        for batch in cut.batches:
            bases = self._bases(batch, reduction, step)
            for value, basis, left in zip(batch.values, bases, batch.left, strict=True):
                torch.mm(basis, value.t(), out=left)
        if not cut.batches:
            return chain(cut.first.device, wire.all_reduce(cut.first), lambda _: cut.finish())

        def multiply_back(_: Tensor) -> torch._C.Future[Tensor]:
            for batch in cut.batches:
                batch.left = orthonormal(batch.left.mT).mT
                for value, left, right in zip(batch.values, batch.left, batch.right, strict=True):
                    torch.mm(left, value, out=right)
            # for this rank's error: the all_reduce overwrites its own Q
            own = [batch.right.clone() for batch in cut.batches]
            summing = wire.all_reduce(cut.second)
            for batch, sent in zip(cut.batches, own, strict=True):
                for value, left, right in zip(batch.values, batch.left, sent, strict=True):
                    value.addmm_(left.t(), right, alpha=-1)
            return summing

        whole = wire.all_reduce(cut.first)
        return chain(cut.first.device, whole, multiply_back, lambda _: cut.finish())

    def messages(self, parameters: Sequence[Tensor], world: int) -> list[Message]:
        """Return an all_reduce of all P and uncompressed gradients, and one of all Q."""
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

    def _bases(self, batch: _Batch, reduction: Reduction, step: int) -> Tensor:
        """Return orthonormal Qᵀ from the previous step, with random vectors for empty columns."""
        seeds = [self.seed + zlib.crc32(f"{name} {step}".encode()) for name in batch.names]
        found = []
        for name, like, seed in zip(batch.names, batch.right, seeds, strict=True):
            kept = reduction.state.bases.get(name)
            if kept is None or kept.shape != like.shape:
                kept = random_basis(like, seed)
            found.append(kept.to(like))
        bases = torch.stack(found).mT
        if bool(empty_columns(bases).any()):
            bases = torch.stack([renewed(b, s) for b, s in zip(bases, seeds, strict=True)])
        return orthonormal(bases).mT

    def fits(self, rows: int, columns: int) -> int:
        """Return the rank of a matrix's approximation; 0 for no compression."""
        rank = min(self.rank, rows, columns)
        return rank if rows * columns >= self.min_saving * rank * (rows + columns) else 0


class _Cut:
    """Division of a bucket into matrices that are compressed and pieces that are not.

    Attributes:
        batches: Compressed matrices, by shape.
        first: All P, then the pieces: input of the first all_reduce.
        second: All Q: input of the second all_reduce.
    """

    def __init__(self, hook: LowRank, reduction: Reduction) -> None:
        self._reduction = reduction
        self._pieces: list[Tensor] = []
        bucket, sent = reduction.bucket, reduction.sent
        found: dict[tuple[int, int, int], tuple[list[str], list[Tensor]]] = {}
        at = 0
        for name, parameter in zip(bucket.names(), bucket.parameters(), strict=True):
            piece = sent[at : at + parameter.numel()]
            rows, at = _rows(parameter), at + parameter.numel()
            if rank := hook.fits(rows, piece.numel() // rows) if len(piece) else 0:
                names, values = found.setdefault((rank, rows, piece.numel() // rows), ([], []))
                names.append(name)
                values.append(piece.view(rows, -1))
            else:
                self._pieces.append(piece)
        self._pieces.append(sent[at:])
        left = [len(values) * rank * n for (rank, n, _), (_, values) in found.items()]
        right = [len(values) * rank * m for (rank, _, m), (_, values) in found.items()]
        self._compressed = sum(left)
        self.first = torch.cat([sent.new_empty(self._compressed), *self._pieces])
        self.second = sent.new_empty(sum(right))
        lefts = self.first[: self._compressed].split(left)
        self.batches = [
            _Batch(names, values, p.view(len(values), rank, n), q.view(len(values), rank, m))
            for ((rank, n, m), (names, values)), p, q in zip(
                found.items(), lefts, self.second.split(right), strict=True
            )
        ]

    def finish(self) -> Tensor:
        """Write P Qᵀ and the pieces' mean to the bucket, and keep the errors and Q."""
        self.second.div_(self._reduction.wire.size)
        for batch in self.batches:
            for value, left, right in zip(batch.values, batch.left, batch.right, strict=True):
                self._put_product(value, left, right)
        at = self._compressed
        for piece in self._pieces:
            mean = self.first[at : at + len(piece)].div_(self._reduction.wire.size)
            piece.zero_()
            self._reduction.put(self._offset(piece), mean, piece)
            at += len(piece)
        bases = {
            n: q for batch in self.batches for n, q in zip(batch.names, batch.right, strict=True)
        }
        return self._reduction.keep(self._reduction.sent, bases=bases)

    def _put_product(self, value: Tensor, left: Tensor, right: Tensor) -> None:
        buffer, at = self._reduction.bucket.buffer(), self._offset(value)
        if buffer.dtype == left.dtype:  # directly into the bucket, without a copy
            torch.mm(left.t(), right, out=buffer[at : at + value.numel()].view(value.shape))
        else:
            self._reduction.put(at, (left.t() @ right).view(-1), value.view(-1))

    def _offset(self, part: Tensor) -> int:
        """Return the first element of a part in the bucket."""
        return int(part.storage_offset() - self._reduction.sent.storage_offset())


def _rows(parameter: Tensor) -> int:
    """Return the size of the dim that is outermost in memory, which is the matrix's first."""
    strides = memory_strides(parameter)
    if parameter.dim() < 2 or strides is None:
        return parameter.shape[0] if parameter.dim() else 1
    outermost = max(range(parameter.dim()), key=lambda d: (strides[d], parameter.shape[d]))
    return parameter.shape[outermost]


def orthonormal(matrices: Tensor) -> Tensor:
    """Return orthonormal columns (…, n, r), n >= r, that span the columns of each matrix.

    The result is NaN for a matrix with values that are not finite. Householder's QR is used because
    its columns are orthonormal for any finite matrix, even zero. Gram-Schmidt divides rounding
    errors by their norm if a matrix lacks rank.

    Example:
        >>> basis = orthonormal(torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))  # of rank 1
        >>> (basis.t() @ basis).round(decimals=4).abs()
        tensor([[1., 0.],
                [0., 1.]])
    """
    finite = matrices.isfinite().flatten(-2).all(-1)
    if bool(finite.all()):
        basis: Tensor = torch.linalg.qr(matrices).Q
        return basis
    finite = finite[..., None, None]
    # LAPACK's result for NaN is undefined
    basis = torch.linalg.qr(matrices.where(finite, 0)).Q
    return torch.where(finite, basis, float("nan"))


def random_basis(like: Tensor, seed: int) -> Tensor:
    """Return normal random numbers, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=torch.float32, generator=generator).to(like)


def renewed(matrix: Tensor, seed: int) -> Tensor:
    """Return the matrix with its empty columns (see `empty_columns`) replaced by random ones.

    Otherwise an empty column would stay empty in all later steps of the power iteration.
    """
    empty = empty_columns(matrix)
    if not bool(empty.any()):
        return matrix
    return torch.where(empty, random_basis(matrix, seed), matrix)


def empty_columns(matrices: Tensor) -> Tensor:
    """Return a mask (…, r) of the columns of (…, n, r) that are zero or negligible."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=-2)
    largest = norms.amax(-1, keepdim=True)
    return norms <= largest * torch.finfo(matrices.dtype).eps
