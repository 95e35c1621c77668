"""GradBucket: the argument of a communication hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.buckets import is_as_read, views
from gradwire.errors import ArgumentError, ArgumentTypeError


class GradBucket:
    """Bucket of gradients in a flat buffer, with views that have the parameters' shapes.

    The methods are the same as those of `torch.distributed.GradBucket`, so hooks written for it run
    unchanged. Only the buffer can be replaced.

    Args:
        index: Number of the bucket in launch order, from 0.
        buffer: Concatenated gradients of `parameters`, 1-d and contiguous, not yet divided by the
            world size. For a sparse parameter, one sparse COO gradient.
        parameters: Parameters, in the order of their gradients in the buffer.
        is_last: True if no other bucket follows in this backward pass.
        names: Names of the parameters in the module. Hooks use them as keys of per-parameter state.
            If None, names are made from the bucket's number and the parameters' indices.
        like: Tensors with the shapes and strides of the gradients in the buffer. If None, the
            parameters.

    Raises:
        ArgumentError: The buffer is not 1-d and contiguous, has its conjugate or negative bit set,
            or has fewer elements than the parameters; or the numbers of names and parameters
            differ.

    Example:
        >>> weight, bias = torch.zeros(2, 2), torch.zeros(2)
        >>> bucket = GradBucket(0, torch.arange(6.0), [weight, bias], is_last=True)
        >>> [g.tolist() for g in bucket.gradients()]
        [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0]]
        >>> bucket.set_buffer(torch.zeros(6))
        >>> bucket.gradients()[1]
        tensor([0., 0.])
    """

    __slots__ = ("_buffer", "_index", "_is_last", "_like", "_names", "_parameters")

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        *,
        is_last: bool,
        names: Sequence[str] | None = None,
        like: Sequence[Tensor] | None = None,
    ) -> None:
        length = sum(p.numel() for p in parameters)
        if buffer.layout == torch.strided and (buffer.dim() != 1 or len(buffer) < length):
            raise ArgumentError(
                f"buffer has shape {tuple(buffer.shape)}: the {len(parameters)} parameters need "
                f"one dimension of at least {length} elements"
            )
        _check_memory(buffer)
        if names is not None and len(names) != len(parameters):
            raise ArgumentError(
                f"names has {len(names)} entries for {len(parameters)} parameters: give one each"
            )
        self._names = None if names is None else tuple(names)
        self._index = index
        self._buffer = buffer
        self._parameters = tuple(parameters)
        self._like = self._parameters if like is None else tuple(like)
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket in launch order, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat gradients, 1-d, or one sparse COO gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer; shape, device and layout must be the same.

        The new buffer is not copied: `gradients()` are views into it. The dtype may differ. The
        hook's result then has the new dtype, too, and is converted when it is copied into the
        gradients.

        Raises:
            ArgumentTypeError: `buffer` is not a tensor.
            ArgumentError: Shape, device or layout differ, or the buffer is not contiguous, or has
                its conjugate or negative bit set.
        """
        if not isinstance(buffer, Tensor):
            raise ArgumentTypeError(f"buffer is a {type(buffer).__name__}: pass a tensor")
        old = self._buffer
        for field in ("shape", "device", "layout"):
            if getattr(buffer, field) != getattr(old, field):
                raise ArgumentError(
                    f"buffer has {field} {getattr(buffer, field)}, the bucket's has "
                    f"{getattr(old, field)}: convert it first"
                )
        _check_memory(buffer)
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views into the buffer, one for each parameter, with its shape and strides.

        They have the buffer's dtype. For a sparse bucket, return the sparse gradient.
        """
        if self._buffer.layout != torch.strided:
            return [self._buffer]
        return views(self._buffer, self._like)

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._parameters)

    def names(self) -> list[str]:
        """Return the parameters' names, in the order of `gradients`.

        A parameter keeps its name when buckets are assigned again.
        """
        if self._names is None:
            return [f"bucket {self._index}, {i}" for i in range(len(self._parameters))]
        return list(self._names)

    def is_last(self) -> bool:
        """Return True if this bucket is the last one of the backward pass."""
        return self._is_last

    def __repr__(self) -> str:
        kind = f"{self._buffer.dtype}, {self._buffer.numel()} elements"
        return f"GradBucket({self._index}, {len(self._parameters)} parameters, {kind})"


def with_buffer(bucket: GradBucket, buffer: Tensor) -> GradBucket:
    """Return a copy of a bucket with a buffer of another dtype, or of pairs of reals if complex."""
    params = bucket.parameters()
    like: Sequence[Tensor] | None = None
    names: Sequence[str] | None = None
    if isinstance(bucket, GradBucket):  # torch.distributed.GradBucket has neither
        like, names = bucket._like, bucket.names()
    if bucket.buffer().is_complex():
        params = [torch.view_as_real(p.detach()) for p in params]
        like = None if like is None else [torch.view_as_real(t.detach()) for t in like]
    return GradBucket(
        bucket.index(), buffer, params, is_last=bucket.is_last(), names=names, like=like
    )


def as_real(bucket: GradBucket) -> GradBucket:
    """Return the bucket, or for complex numbers a bucket of pairs of reals in the same memory."""
    buffer = bucket.buffer()
    if not buffer.is_complex():
        return bucket
    return with_buffer(bucket, torch.view_as_real(buffer).view(-1))


def _check_memory(buffer: Tensor) -> None:
    """Raise if the memory of a dense buffer differs from its values: backends send the memory."""
    if buffer.layout != torch.strided or is_as_read(buffer):
        return
    if not buffer.is_contiguous():
        found, remedy = f"has stride {buffer.stride(0)}", "contiguous"
    elif buffer.is_conj():
        found, remedy = "has its conjugate bit set", "resolve_conj"
    else:
        found, remedy = "has its negative bit set", "resolve_neg"
    raise ArgumentError(f"buffer {found}, but backends send its memory: pass buffer.{remedy}()")
