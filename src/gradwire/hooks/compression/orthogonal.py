"""Bases of matrices that may lack rank: orthonormal columns, whatever comes in.

Householder's QR gives orthonormal columns for any finite matrix, also for one of zeros, where the
Gram-Schmidt process divides rounding errors by their own norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthonormal", "random_basis", "renewed"]


def orthonormal(matrix: Tensor) -> Tensor:
    """(n, r), n >= r, orthonormal columns that span at least the matrix's.

    Example:
        >>> basis = orthonormal(torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))  # of rank 1
        >>> (basis.t() @ basis).round(decimals=4).abs()
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, float("nan"))  # LAPACK's answer to it is undefined
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def random_basis(like: Tensor, seed: int) -> Tensor:
    """Normal random numbers, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like)


def renewed(matrix: Tensor, seed: int) -> Tensor:
    """The matrix; random columns where its own are zero, or nothing beside the largest.

    A direction that has found nothing would look for nothing ever after.
    """
    norms = torch.linalg.vector_norm(matrix, dim=0)
    empty = norms <= norms.max() * torch.finfo(matrix.dtype).eps
    if not bool(empty.any()):
        return matrix
    return torch.where(empty, random_basis(matrix, seed), matrix)
