"""GradBucket: what a communication hook receives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.buckets import views
from gradwire.buckets.flat import is_as_read
from gradwire.errors import ArgumentError, ArgumentTypeError


class GradBucket:
    """One bucket of gradients, flat, with views that have the parameters' shapes.

    The methods are those of `torch.distributed.GradBucket`, so that hooks written for it run
    unchanged. All but the buffer is fixed.

    Args:
        index: The bucket's number in the order of launch, from 0.
        buffer: 1-d and contiguous, the gradients of `parameters` one after another, not yet divided
            by the world size. A single sparse COO gradient for a sparse parameter.
        parameters: The parameters, in the order in which their gradients lie in the buffer.
        is_last: Whether no other bucket follows in this backward.
        names: The parameters' names in the module, by which a hook keeps what belongs to them;
            None: made of the bucket's number and the parameters' places.
        like: Tensors with the shapes and strides by which gradients lie in the buffer; None: the
            parameters.

    Raises:
        ArgumentError: The buffer is not 1-d and contiguous, is conjugated or negated when read, or
            has fewer elements than the parameters; or there are more or fewer names than
            parameters.

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
        """The bucket's number in the order of launch, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """The flat gradients, 1-d; or one sparse COO gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put other values in the bucket; `buffer` must have the shape and device it had.

        It is not copied: what is written to `gradients()` is written to it. The dtype may be
        another: the hook's result then has that dtype too, and is converted when it is copied into
        the gradients.

        Raises:
            ArgumentTypeError: Not a tensor.
            ArgumentError: Shape, device or layout differ, or the buffer is not contiguous, or is
                conjugated or negated when read.
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
        """Views into the buffer, one for each parameter, with its shape (and strides if dense).

        They have the buffer's dtype. For a sparse bucket, the one sparse gradient.
        """
        if self._buffer.layout != torch.strided:
            return [self._buffer]
        return views(self._buffer, self._like, keep_strides=True)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._parameters)

    def names(self) -> list[str]:
        """The parameters' names, in the order of `gradients`: the same in any other bucket."""
        if self._names is None:
            return [f"bucket {self._index}, {i}" for i in range(len(self._parameters))]
        return list(self._names)

    def is_last(self) -> bool:
        """Whether this bucket is the last to be communicated in this backward."""
        return self._is_last

    def __repr__(self) -> str:
        kind = f"{self._buffer.dtype}, {self._buffer.numel()} elements"
        return f"GradBucket({self._index}, {len(self._parameters)} parameters, {kind})"


def with_buffer(bucket: GradBucket, buffer: Tensor) -> GradBucket:
    """A bucket with another buffer: its values in another dtype, complex ones as pairs of reals."""
    params = bucket.parameters()
    like: Sequence[Tensor] | None = None
    names: Sequence[str] | None = None
    if isinstance(bucket, GradBucket):  # torch's own, under torch's wrapper, has neither
        like, names = bucket._like, bucket.names()
    if bucket.buffer().is_complex():
        params = [torch.view_as_real(p.detach()) for p in params]
        like = None if like is None else [torch.view_as_real(t.detach()) for t in like]
    return GradBucket(
        bucket.index(), buffer, params, is_last=bucket.is_last(), names=names, like=like
    )


def _check_memory(buffer: Tensor) -> None:
    """Refuse a dense buffer whose memory is not what is read: backends send memory as it lies."""
    if buffer.layout != torch.strided or is_as_read(buffer):
        return
    if not buffer.is_contiguous():
        found, remedy = f"has stride {buffer.stride(0)}", "contiguous"
    elif buffer.is_conj():
        found, remedy = "is conjugated when it is read", "resolve_conj"
    else:
        found, remedy = "is negated when it is read", "resolve_neg"
    raise ArgumentError(f"buffer {found}: its memory is sent as it lies, pass buffer.{remedy}()")
