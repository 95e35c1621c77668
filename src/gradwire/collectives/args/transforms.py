"""What does not go through torch.func's transforms is refused there, with the remedy."""

from __future__ import annotations

import torch

from gradwire.errors import NotSupportedError

__all__ = ["refuse_in_transforms", "refuse_split"]


def refuse_in_transforms(what: str, remedy: str) -> None:
    """Raise for a tensor that no transform knows of, where others' are transformed.

    Raises:
        NotSupportedError: Within torch.func's transforms.
    """
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise NotSupportedError(f"{what} inside torch.func transforms: {remedy}")


def refuse_split() -> None:
    """Raise where a collective cannot be split into a start and a wait.

    Raises:
        NotSupportedError: Within torch.func's transforms and torch.compile.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            "async_op=True inside torch.func transforms and torch.compile: leave it out there"
        )
