"""Buckets and communication hooks of torch.distributed, implemented by gradwire.

Hooks follow PyTorch's rules for annotations and exceptions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire import ddp as ours
from gradwire import hooks
from gradwire.buckets import plan_buckets
from gradwire.compat.replacements import RefusedError, Replacement, as_runtime_error
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    HookError,
    NotSupportedError,
)
from gradwire.hooks import (
    CommHook,
    DelegatingHook,
    GradBucket,
    HookReturn,
    StatefulHook,
    bind_hook,
    check_hook,
    hook_name,
)

Hook = Callable[[Any, Any], Any]
EMPTY = "(PyTorch's message: !tensors.empty() INTERNAL ASSERT FAILED)"


@as_runtime_error
def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, src: int = 0
) -> None:
    """See gradwire.ddp.broadcast_coalesced; `src` is a rank in the group."""
    _check_list("tensors", tensors, Tensor, "tensors")
    _check_list("buffer_size", [buffer_size], int, "an integer from 0 on")
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
    _check_list("tensors", tensors, Tensor, "tensors")
    _check_list("bucket_size", bucket_size, int, "integers from 0 on")
    _check_list("tensor_indices", tensor_indices, int, "integers from 0 on")
    if expect_sparse_gradient and len(expect_sparse_gradient) != len(tensors):
        raise ArgumentError(
            f"expect_sparse_gradient has {len(expect_sparse_gradient)} entries for {len(tensors)} "
            "tensors: give one for each, or none"
        )
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise NotSupportedError(
                f"tensor {i} is {tensor.layout}. No support for sparse tensors."
            )
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


def _check_list(name: str, given: Any, kind: type, what: str) -> None:
    """Raise if PyTorch's function would reject an argument's type, or a list without tensors."""
    fits = isinstance(given, list | tuple) and all(isinstance(value, kind) for value in given)
    if not fits or (kind is int and any(value < 0 for value in given)):
        raise ArgumentTypeError(f"{name} is {given!r}: give a list of {what}")
    if kind is Tensor and not given:
        raise ArgumentError(f"{name} is empty: give at least one {EMPTY}")


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


BUCKETS = (dist.GradBucket, GradBucket, Any)
RETURNS = (torch.futures.Future[Tensor], torch.futures.Future[Any], HookReturn, Any)


def adapt_hook(state: object, hook: Any) -> Any:
    """Wrap a hook so that its exceptions keep their class; return other objects unchanged."""
    if isinstance(hook, StatefulHook):
        bind_hook(state, hook)
        return StatefulErrorPreservingHook(hook)
    if callable(hook):
        _check_annotations(hook)
        return ErrorPreservingHook(check_hook(hook))
    return hook


def _check_annotations(hook: Callable[..., object]) -> None:
    """Raise if PyTorch would reject the annotation of the bucket or the result."""
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    try:
        names = list(inspect.signature(hook).parameters)
    except ValueError:
        return  # a built-in has no signature
    annotations = getattr(function, "__annotations__", None) or {}
    found = {name: _evaluated(a, function) for name, a in annotations.items()}
    bucket = found.get(names[1], Any) if len(names) > 1 else Any
    if bucket not in BUCKETS:
        raise RefusedError(
            f"hook {hook_name(hook)} takes a {bucket} (PyTorch's message: Communication hook: "
            "bucket annotation should be dist.GradBucket.)"
        )
    if found.get("return", Any) not in RETURNS:
        raise RefusedError(
            f"hook {hook_name(hook)} returns {found['return']} (PyTorch's message: Communication "
            "hook: return annotation should be torch.futures.Future[torch.Tensor].)"
        )


def _evaluated(annotation: Any, function: object) -> Any:
    """Evaluate an annotation that is a string; return Any if this fails."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(function, "__globals__", {}))
    except Exception:  # for example, a name that is imported for type checkers only
        return Any


class ErrorPreservingHook:
    """Hook whose exceptions keep their class, as in PyTorch, and are also HookErrors."""

    def __init__(self, hook: CommHook) -> None:
        functools.update_wrapper(self, hook, updated=())
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        if name == "hook" or name.startswith("__"):  # unpickling asks before `hook` is set
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Call the hook."""
        with _errors_as_raised(self.hook):
            return self.hook(state, bucket)


class StatefulErrorPreservingHook(DelegatingHook):
    """`ErrorPreservingHook` for a `StatefulHook`."""

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Run the hook."""
        with _errors_as_raised(self.hook):
            return self.hook.run_hook(bucket)

    def parse_hook_result(self, result: Any) -> Tensor:
        """Parse a result as the hook does."""
        with _errors_as_raised(self.hook):
            return self.hook.parse_hook_result(result)


@contextmanager
def _errors_as_raised(hook: CommHook) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Keep a backend's failure unchanged: its type tells the reducer that the hook is not at
        # fault.
        if isinstance(error, DistributedError | dist.DistError) or type(error) is RuntimeError:
            raise
        raise _with_own_class(error, hook) from error


def _with_own_class(error: Exception, hook: CommHook) -> HookError:
    """Return a HookError that also has the class, arguments and attributes of another error."""
    kind = type(error)
    text = f"hook {hook_name(hook)} raised {kind.__name__}: {error}"
    try:
        both = type(kind.__name__, (HookError, kind), {"__str__": lambda _: text})
        own: HookError = kind.__new__(both, *error.args)
        native = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        cast("Any", native).__init__(own, *error.args)  # sets, for example, an OSError's errno
    except TypeError:  # the class cannot be a second base, or takes other arguments
        return HookError(text)
    own.args = error.args
    own.__dict__.update(error.__dict__)
    return own
