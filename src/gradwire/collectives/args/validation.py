"""Groups, roots and tensors as arguments, and what `torch.func` transforms allow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group, rank_in_group
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError


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


def resolve_group(group: object) -> ProcessGroup:
    """The group, or the default group for None, if this rank belongs to it.

    Raises:
        ArgumentTypeError: Not a process group.
        ArgumentError: This rank is outside the group, or there is no default group.
    """
    return check_group(default_group("group") if group is None else group)


def root_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """`rank_in_group`, for an argument that has to be given.

    Raises:
        ArgumentError: Neither or both are given, or the rank is not in the group.
    """
    root = rank_in_group(group, rank, group_rank, name)
    if root is None:
        raise ArgumentError(f"no root: give {name} (a global rank) or group_{name} (in the group)")
    return root


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
