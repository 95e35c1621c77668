"""Which tensors a collective takes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_dense", "check_has_data"]


def check_dense(x: object, name: str = "x") -> None:
    """Raise if it is no tensor, or one without strides.

    Raises:
        ArgumentTypeError: Not a tensor.
        ArgumentError: Sparse, or of another layout than strided.
    """
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}: give a tensor")
    if x.layout != torch.strided:
        raise ArgumentError(
            f"{name} has layout {x.layout}: give dense tensors, for instance its parts"
        )


def check_has_data(x: Tensor, name: str) -> None:
    """Raise if it is a tensor on "meta", which has nothing to send.

    Raises:
        ArgumentError: It is.
    """
    if x.device.type == "meta":
        raise ArgumentError(f"{name} is on meta on the root: give the tensor to send")
