"""Bases of matrices that may lack rank: orthonormal columns, whatever comes in.

Householder's QR gives orthonormal columns for any finite matrix, also for one of zeros, where the
Gram-Schmidt process divides rounding errors by their own norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["empty_columns", "orthonormal", "random_basis", "renewed"]


def orthonormal(matrices: Tensor) -> Tensor:
    """(…, n, r), n >= r, orthonormal columns that span at least those of each matrix.

    NaN in all of a matrix that is not finite.

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
    # LAPACK's answer to NaN is undefined
    basis = torch.linalg.qr(matrices.where(finite, 0)).Q
    return torch.where(finite, basis, float("nan"))


def random_basis(like: Tensor, seed: int) -> Tensor:
    """Normal random numbers, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=torch.float32, generator=generator).to(like)


def renewed(matrix: Tensor, seed: int) -> Tensor:
    """The matrix; random columns where its own are zero, or nothing beside the largest.

    A direction that has found nothing would look for nothing ever after.
    """
    empty = empty_columns(matrix)
    if not bool(empty.any()):
        return matrix
    return torch.where(empty, random_basis(matrix, seed), matrix)


def empty_columns(matrices: Tensor) -> Tensor:
    """Which columns of (…, n, r) are zero, or nothing beside the largest: (…, r)."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=-2)
    largest = norms.amax(-1, keepdim=True)
    return norms <= largest * torch.finfo(matrices.dtype).eps
