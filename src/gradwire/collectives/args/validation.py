"""Validation of groups, roots and tensors, and of calls inside `torch.func` transforms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group, rank_in_group
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError


def check_dense(x: object, name: str = "x") -> None:
    """Raise unless `x` is a strided tensor.

    Raises:
        ArgumentTypeError: `x` is not a tensor.
        ArgumentError: The tensor is sparse, or has another layout than strided.
    """
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}: give a tensor")
    if x.layout != torch.strided:
        raise ArgumentError(
            f"{name} has layout {x.layout}: give dense tensors, for instance its indices and values"
        )


def check_has_data(x: Tensor, name: str) -> None:
    """Raise if the tensor is on the "meta" device, which holds no data to send.

    Raises:
        ArgumentError: The tensor is on "meta".
    """
    if x.device.type == "meta":
        raise ArgumentError(f"{name} is on the meta device on the root: give the tensor to send")


def resolve_group(group: object) -> ProcessGroup:
    """Return the group, or the default group for None, after checking that this rank is a member.

    Raises:
        ArgumentTypeError: `group` is not a process group.
        ArgumentError: This rank is outside the group, or there is no default group.
    """
    return check_group(default_group("group") if group is None else group)


def root_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """Return the root's rank in the group, given its global rank or its rank in the group.

    Raises:
        ArgumentError: Neither or both are given, or the rank is not in the group.
    """
    root = rank_in_group(group, rank, group_rank, name)
    if root is None:
        raise ArgumentError(f"no root: give {name} (a global rank) or group_{name} (in the group)")
    return root


def refuse_in_transforms(what: str, remedy: str) -> None:
    """Raise inside `torch.func` transforms, for an argument that the transform cannot follow.

    Raises:
        NotSupportedError: A transform is active.
    """
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise NotSupportedError(f"{what} inside torch.func transforms: {remedy}")


def refuse_split(x: Tensor) -> None:
    """Raise if a collective of the tensor cannot be asynchronous.

    Raises:
        NotSupportedError: A `torch.func` transform, `torch.compile` or forward mode is active.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            "async_op=True inside torch.func transforms or torch.compile: use async_op=False there"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotSupportedError("async_op=True with a tangent: use async_op=False there")
