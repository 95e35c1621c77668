"""The rules that all linear collectives share: backward is the adjoint, forward mode the op itself.

A linear collective says how it starts, what its adjoint is and what shape it gives. From that
follow the autograd function (whose backward calls `linear` again, so that every derivative has a
derivative), its batching rule and the custom op that stands for it in a compiled graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, forward_ad
from torch.distributed import ProcessGroup

from gradwire.collectives.checks.consistency import CheckContext, check_backward
from gradwire.collectives.wire import Pending

__all__ = [
    "Linear",
    "compiling",
    "eager_apply",
    "graph_is_needed",
    "is_transformed",
    "linear",
    "register",
    "restored_linear",
    "result_like",
]

_NONE, _INT, _TUPLE = range(3)


@dataclass(frozen=True)
class Linear(ABC):
    """A collective that is linear in its tensor: a plan, made before anything is sent.

    Only the first dim is split or concatenated. So `vmap` needs no rule for each collective: its
    batch dim is moved to the end, and one collective moves the whole batch.

    A subclass is a frozen dataclass, whose further fields are ints, None, or (nested) tuples of
    these.
    """

    name: ClassVar[str]
    field_names: ClassVar[tuple[str, ...]]  # listed once, because Dynamo traces `plan`
    group: ProcessGroup

    @abstractmethod
    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Send, without gradients; `blocking` says that the result is waited for at once."""

    @abstractmethod
    def adjoint(self) -> Linear:
        """The transpose, under the inner product that sums over the ranks."""

    def rows(self, rows: int) -> int:
        """The size of the result in the first dim, from the input's."""
        return rows

    def plan(self) -> list[int]:
        """Its fields but the group, as the integers that the custom op takes."""
        return [n for name in self.field_names for n in _as_ints(getattr(self, name))]


def _as_ints(value: Any) -> list[int]:
    """An int, None, or a tuple of these and of tuples, as integers that say how to read them."""
    if value is None:
        return [_NONE]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(n for item in value for n in _as_ints(item))]
    return [_INT, value]


def _from_ints(ints: Iterator[int]) -> Any:
    """The inverse of `_as_ints`: reads one value."""
    kind = next(ints)
    if kind == _NONE:
        return None
    if kind == _INT:
        return next(ints)
    return tuple(_from_ints(ints) for _ in range(next(ints)))


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, op: Linear, context: CheckContext | None) -> Tensor:
        return op.start(x, blocking=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.op, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with check_backward(ctx.check, cotangent):
            return linear(ctx.op.adjoint(), cotangent, ctx.check), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _op: None, _context: None) -> Any:
        return linear(ctx.op, tangent, ctx.check)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, op: Linear, context: CheckContext | None) -> Any:
        return linear(op, x.movedim(in_dims[0], -1), context), -1


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """A function's `apply` where neither torch.func nor a compiler looks, at less cost.

    PyTorch inspects the signature of a `forward` that has a `setup_context` in each call, for
    default arguments, which ours do not have: 38 of 70 µs of an all_reduce on 2.15, in C++; before,
    in `Function.apply`, which is left out here. A `forward` that gets the context is not inspected.
    """
    forward, setup_context = function.forward, function.setup_context

    def forward_with_context(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    members = {
        "forward": staticmethod(forward_with_context),
        "setup_context": staticmethod(Function.setup_context),
    }
    eager = type(function.__name__, (function,), members)
    apply: Callable[..., Any] = super(Function, eager).apply  # type: ignore[misc]
    return apply


_apply_linear = eager_apply(_Linear)


def linear(op: Linear, x: Tensor, context: CheckContext | None = None) -> Tensor:
    """The collective on a tensor, differentiable in every mode."""
    if compiling(x):
        return _compiled(op, x)
    if is_legacy_batchedtensor(x):
        return _batched_cotangent(op, x, context)
    if torch._C._are_functorch_transforms_active():
        return _Linear.apply(x, op, context)  # type: ignore[no-any-return, no-untyped-call]
    if not graph_is_needed(x):
        return op.start(x, blocking=True).wait()
    return _apply_linear(x, op, context)  # type: ignore[no-any-return]


def _batched_cotangent(op: Linear, x: Tensor, context: CheckContext | None) -> Tensor:
    """The collective on cotangents of `is_grads_batched`, which has a vmap without rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    y = linear(op, torch._remove_batch_dim(x, level, 1, x.dim()), context)
    return torch._add_batch_dim(y, y.dim() - 1, level)


def graph_is_needed(x: Tensor) -> bool:
    """Whether a derivative may be asked of what is made from the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether torch.func's transforms or forward mode are active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Whether this call is being traced: by Dynamo, or below it, with tensors without data."""
    return torch.compiler.is_compiling() or isinstance(x, (FakeTensor, FunctionalTensor))


# --- compiled graphs ---

_kinds: dict[str, type[Linear]] = {}
_custom: dict[str, Callable[[Tensor, list[int], str], Tensor]] = {}


def _compiled(op: Linear, x: Tensor) -> Tensor:
    return _custom[op.name](x, op.plan(), op.group.group_name)


def result_like(x: Tensor, op: Linear) -> Tensor:
    """An empty tensor of the shape that the collective gives."""
    return x.new_empty((op.rows(x.shape[0]), *x.shape[1:]) if x.dim() else ())


def restored_linear(name: str, plan: Sequence[int], group_name: str) -> Linear:
    """The collective that a custom op stands for."""
    ints = iter(plan)
    kind: Any = _kinds[name]
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    restored: Linear = kind(group, *(_from_ints(ints) for _ in kind.field_names))
    return restored


def register(kind: type[Linear]) -> type[Linear]:
    """Class decorator: give the collective a custom op, `gradwire::<name>`, for compiled graphs.

    Dynamo refuses an autograd function with a rule for forward mode; so compiled graphs have an
    operator of their own, whose backward is the adjoint's operator.

    Stands above `@dataclass`, whose fields it lists; `name` is unique. Checks are not included: the
    public function calls `run_checked`.
    """
    name = kind.name
    _kinds[name] = kind
    kind.field_names = tuple(field.name for field in fields(kind) if field.name != "group")

    def run(x: Tensor, plan: list[int], group: str) -> Tensor:
        return restored_linear(name, plan, group).start(x, blocking=True).wait()

    def fake(x: Tensor, plan: list[int], group: str) -> Tensor:
        return result_like(x, restored_linear(name, plan, group))

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.group = inputs

    def backward(ctx: Any, cotangent: Tensor) -> Any:
        op = restored_linear(name, ctx.plan, ctx.group)
        return _compiled(op.adjoint(), cotangent), None, None

    schema = "(Tensor x, int[] plan, str group) -> Tensor"
    op = torch.library.custom_op(f"gradwire::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=save)
    _custom[name] = op
    return kind
