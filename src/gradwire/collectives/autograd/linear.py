"""The rules that all linear collectives share: backward is the adjoint, forward mode the op itself.

A linear collective says how it starts, what its adjoint is and what shape it gives. From that
follow the autograd function (whose backward calls `linear` again, so that every derivative has a
derivative), its batching rule and the custom op that stands for it in a compiled graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, forward_ad
from torch.distributed import ProcessGroup

from gradwire.collectives.checks.consistency import Note, in_backward
from gradwire.collectives.wire import Pending

__all__ = [
    "Linear",
    "compiling",
    "graph_is_needed",
    "linear",
    "register",
    "restored_linear",
    "result_like",
]


class Linear(ABC):
    """A collective that is linear in its tensor: a plan, made before anything is sent.

    The first dim is the one that is cut or joined; the others are opaque, so that a batch dim of
    `vmap` can travel as the last one.
    """

    name: ClassVar[str]
    group: ProcessGroup

    @abstractmethod
    def start(self, x: Tensor, now: bool = False) -> Pending:
        """Send, without gradients; `now` says that the result is waited for at once."""

    @abstractmethod
    def adjoint(self) -> Linear:
        """The transpose, under the inner product that sums over the ranks."""

    def rows(self, rows: int) -> int:
        """How long the result is in the first dim, if it differs from the input."""
        return rows

    def plan(self) -> list[int]:
        """Its fields besides the group, as the custom op carries them."""
        return []

    @classmethod
    @abstractmethod
    def of(cls, plan: Sequence[int], group: ProcessGroup) -> Linear:
        """The inverse of `plan`."""


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, op: Linear, note: Note | None) -> Tensor:
        return op.start(x, now=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.op, ctx.note = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with in_backward(ctx.note, cotangent):
            return linear(ctx.op.adjoint(), cotangent, ctx.note), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _op: None, _note: None) -> Any:
        return linear(ctx.op, tangent, ctx.note)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, op: Linear, note: Note | None) -> Any:
        return linear(op, x.movedim(in_dims[0], -1), note), -1


# Function.apply inspects forward's signature for default arguments, which costs more than all else
# it does; there are none here.
_apply_linear = super(Function, _Linear).apply


def linear(op: Linear, x: Tensor, note: Note | None = None) -> Tensor:
    """The collective on a tensor, differentiable in every mode."""
    if compiling(x):
        return _compiled(op, x)
    if is_legacy_batchedtensor(x):
        return _grads_batched(op, x, note)
    if torch._C._are_functorch_transforms_active():
        return _Linear.apply(x, op, note)  # type: ignore[no-any-return, no-untyped-call]
    if not graph_is_needed(x):
        return op.start(x, now=True).wait()
    return _apply_linear(x, op, note)  # type: ignore[no-any-return, no-untyped-call]


def _grads_batched(op: Linear, x: Tensor, note: Note | None) -> Tensor:
    """The collective on cotangents of `is_grads_batched`, which has a vmap without rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    y = linear(op, torch._remove_batch_dim(x, level, 1, x.dim()), note)
    return torch._add_batch_dim(y, y.dim() - 1, level)


def graph_is_needed(x: Tensor) -> bool:
    """Whether a derivative may be asked of what is made from the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Whether this call is being traced: by dynamo, or below it, with tensors without data."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor | FunctionalTensor)


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
    return _kinds[name].of(plan, dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]


def register(kind: type[Linear]) -> type[Linear]:
    """Class decorator: give the collective a custom op, `gradwire::<name>`, for compiled graphs.

    Dynamo refuses an autograd function with a rule for forward mode; so compiled graphs have an
    operator of their own, whose backward is the adjoint's operator.
    """
    name = kind.name
    _kinds[name] = kind

    def run(x: Tensor, plan: list[int], group: str) -> Tensor:
        return restored_linear(name, plan, group).start(x, now=True).wait()

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
