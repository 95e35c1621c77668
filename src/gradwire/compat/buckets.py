"""Gradient-related functions and hooks of torch.distributed, implemented by gradwire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire import ddp as ours
from gradwire import hooks
from gradwire.buckets import plan_buckets
from gradwire.compat.error_messages import as_runtime_error
from gradwire.compat.replacements import Replacement
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from gradwire.hooks import StatefulHook

Hook = Callable[[Any, Any], Any]
EMPTY = "(PyTorch's message: !tensors.empty() INTERNAL ASSERT FAILED)"


@as_runtime_error
def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, src: int = 0
) -> None:
    """See gradwire.ddp.broadcast_coalesced; `src` is a rank in the group."""
    _check_list("tensors", tensors, _is_tensor, "tensors")
    _check_list("buffer_size", [buffer_size], _is_size, "an integer from 0 on")
    if not tensors:
        raise ArgumentError(f"tensors is empty: give at least one {EMPTY}")
    ours.broadcast_coalesced(process_group, tensors, max(buffer_size, 1), group_src=src)


@as_runtime_error
def _compute_bucket_assignment_by_size(
    tensors: Sequence[Tensor],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = [],
    tensor_indices: Sequence[int] = [],
    logger: object = None,
) -> tuple[list[list[int]], list[int]]:
    """See gradwire.buckets.plan_buckets; returns the buckets, and the size limit of each."""
    _check_list("tensors", tensors, _is_tensor, "tensors")
    _check_list("bucket_size", bucket_size, _is_size, "integers from 0 on")
    _check_list("tensor_indices", tensor_indices, _is_size, "integers from 0 on")
    if not tensors:
        raise ArgumentError(f"tensors is empty: give at least one {EMPTY}")
    if expect_sparse_gradient and len(expect_sparse_gradient) != len(tensors):
        raise ArgumentError(
            f"expect_sparse_gradient has {len(expect_sparse_gradient)} entries for {len(tensors)} "
            "tensors: give one for each, or none"
        )
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise _SparseError(f"tensor {i} is {tensor.layout}. No support for sparse tensors.")
    # A limit of 0 closes a bucket after every tensor, as a limit of one byte does for tensors of
    # one byte or more.
    plan = plan_buckets(
        [max(t.nbytes, 1) if 0 in bucket_size else t.nbytes for t in tensors],
        [t.dtype for t in tensors],
        [t.device for t in tensors],
        [max(limit, 1) for limit in bucket_size],
        alone=expect_sparse_gradient,
        indices=tensor_indices,
    )
    limits = [0 if limit == 1 and 0 in bucket_size else limit for limit in plan.limits]
    return [list(bucket) for bucket in plan.buckets], limits


def _check_list(name: str, given: Any, fits: Callable[[object], bool], what: str) -> None:
    """Raise if PyTorch's function would reject the type of an argument.

    Raises:
        ArgumentTypeError: The argument is not a list, or an entry is invalid.
    """
    if not isinstance(given, list | tuple) or not all(map(fits, given)):
        raise ArgumentTypeError(f"{name} is {given!r}: give a list of {what}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 0


class _SparseError(NotSupportedError, RuntimeError):
    """NotSupportedError that is also a RuntimeError, which PyTorch raises."""


def allreduce_hook(process_group: ProcessGroup | None, bucket: Any) -> Any:
    """See gradwire.hooks.all_reduce."""
    return hooks.all_reduce(process_group, bucket)


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: Any) -> Any:
    """See gradwire.hooks.fp16."""
    return hooks.fp16(process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: Any) -> Any:
    """See gradwire.hooks.bf16."""
    return hooks.bf16(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """See gradwire.hooks.compress."""
    return _wrapper(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """See gradwire.hooks.compress."""
    return _wrapper(hook, torch.bfloat16, "bf16_compress_wrapper_hook")


def _wrapper(hook: Hook, dtype: torch.dtype, name: str) -> Hook:
    inner = hooks.compress(hook, dtype)
    if isinstance(inner, StatefulHook):
        return inner

    def wrapped(hook_state: Any, bucket: Any) -> Any:
        return inner(hook_state, bucket)

    wrapped.__name__ = wrapped.__qualname__ = name
    _annotate(wrapped)
    wrapped.single_collective = getattr(hook, "single_collective", False)  # type: ignore[attr-defined]
    wrapped.takes_group = getattr(hook, "takes_group", False)  # type: ignore[attr-defined]
    return wrapped


def _annotate(hook: Hook) -> Hook:
    """Add the annotations that PyTorch's `register_comm_hook` requires."""
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return hook


_HOOKS = (allreduce_hook, fp16_compress_hook, bf16_compress_hook)
for _hook in _HOOKS:
    _annotate(_hook).single_collective = True  # type: ignore[attr-defined]

_DEFAULT_HOOKS = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks",)
_C10D = ("torch.distributed", "torch._C._distributed_c10d")

BUCKET_TABLE = (
    Replacement(_broadcast_coalesced, "_broadcast_coalesced", _C10D),
    Replacement(_compute_bucket_assignment_by_size, "_compute_bucket_assignment_by_size", _C10D),
    *(
        Replacement(hook, hook.__name__, _DEFAULT_HOOKS, wherever_loaded=True)
        for hook in (*_HOOKS, fp16_compress_wrapper, bf16_compress_wrapper)
    ),
)
"""Replacements, and the modules of PyTorch that receive them."""
