"""What does not go through torch.func's transforms is refused there, with the remedy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradwire.errors import NotSupportedError

__all__ = ["refuse_in_transforms", "refuse_split"]


def refuse_in_transforms(what: str, remedy: str) -> None:
    """Raise for a tensor that no transform knows of, where others' are transformed.

    Raises:
        NotSupportedError: Within torch.func's transforms.
    """
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise NotSupportedError(f"{what} inside torch.func transforms: {remedy}")


def refuse_split(x: Tensor) -> None:
    """Raise where a collective of the tensor cannot be split into a start and a wait.

    Raises:
        NotSupportedError: Within torch.func's transforms, torch.compile, and forward mode.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            "async_op=True inside torch.func transforms and torch.compile: leave it out there"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotSupportedError("async_op=True of a tensor with a tangent: leave it out there")
