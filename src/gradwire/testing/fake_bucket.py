"""A bucket without processes, to test communication hooks with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ArgumentError
from gradwire.hooks import GradBucket


class FakeBucket(GradBucket):
    """A `GradBucket` made from gradients, for calling a hook directly.

    Args:
        *gradients: At least one tensor: the local gradients, any shapes, of one dtype and device.
        index: The bucket's number.
        is_last: True if no other bucket follows.
        parameters: The parameters; made with the gradients' shapes if None.
        names: The parameters' names; made of the bucket's number and their places if None.

    Raises:
        ArgumentError: There are no gradients, or gradients and parameters do not fit.

    Example:
        A hook that doubles, tested in one process:

        >>> bucket = FakeBucket(torch.ones(2, 2), torch.tensor([3.0]))
        >>> def double(state, bucket):
        ...     return bucket.buffer() * 2
        >>> double(None, bucket)
        tensor([2., 2., 2., 2., 6.])
        >>> [tuple(p.shape) for p in bucket.parameters()]
        [(2, 2), (1,)]
    """

    def __init__(
        self,
        *gradients: Tensor,
        index: int = 0,
        is_last: bool = True,
        parameters: Sequence[Tensor] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not gradients:
            raise ArgumentError("gradients is empty: give at least one tensor")
        params = (
            [torch.zeros_like(g) for g in gradients] if parameters is None else list(parameters)
        )
        buffer = torch.empty(
            sum(g.numel() for g in gradients), dtype=gradients[0].dtype, device=gradients[0].device
        )
        super().__init__(index, buffer, params, is_last=is_last, names=names)
        for view, gradient in zip(self.gradients(), gradients, strict=True):
            view.copy_(gradient)
