"""send, recv and send_recv: each other's adjoints, in an order given by tokens.

Messages between two ranks are matched by their order alone. Each call takes the token of the one
before and gives one; `tie` makes the loss depend on the last. So autograd runs the backwards of the
calls on every rank in exactly the reverse order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire._groups import rank_in_group
from gradwire._torch import nested_forward_mode
from gradwire.collectives import wire
from gradwire.collectives.args.validation import check_dense, resolve_group, root_of
from gradwire.collectives.autograd.linear_collective import apply_linear
from gradwire.collectives.ops.plans import SendReceive
from gradwire.errors import ArgumentError


class _Send(Function):
    """From a tensor and a token to a token."""

    @staticmethod
    def forward(x: Tensor, token: Tensor, to: int, group: ProcessGroup) -> Tensor:
        wire.send(x, to, group).wait()
        return token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, ctx.to, ctx.group = inputs
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        like = torch.empty((), dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)
        cotangent, token = _Receive.apply(like, token, ctx.to, ctx.group)  # type: ignore[no-untyped-call]
        return cotangent, token, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, token: Tensor, *_: None) -> Tensor:
        return _Send.apply(tangent, token, ctx.to, ctx.group)  # type: ignore[no-any-return, no-untyped-call]


class _Receive(Function):
    """From a token to a tensor and a token."""

    @staticmethod
    def forward(like: Tensor, token: Tensor, source: int, group: ProcessGroup) -> Any:
        return wire.receive(like, source, group).wait(), token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.like, _, ctx.source, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, token: Tensor) -> Any:
        token = _Send.apply(cotangent, token, ctx.source, ctx.group)  # type: ignore[no-untyped-call]
        return torch.zeros_like(cotangent) if ctx.needs_input_grad[0] else None, token, None, None

    @staticmethod
    def jvp(ctx: Any, _like: Any, token: Tensor, *_: None) -> Any:
        return _Receive.apply(ctx.like, token, ctx.source, ctx.group)  # type: ignore[no-untyped-call]


class _Tie(Function):
    """From a tensor and a token to the tensor."""

    @staticmethod
    def forward(x: Tensor, token: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _Untie.apply(cotangent, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        with nested_forward_mode():
            return tangent.clone()


class _Untie(Function):
    """From a tensor to the tensor and the first token of the messages in backward.

    It depends on forward's last token, so that a second backward, after the messages of the first,
    runs those of forward on every rank.
    """

    @staticmethod
    def forward(x: Tensor, token: Tensor) -> Any:
        return x.clone(memory_format=torch.contiguous_format), torch.zeros_like(token)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, token: Tensor) -> Any:
        tied = _Tie.apply(cotangent, token)  # type: ignore[no-untyped-call]
        return _Untie.apply(tied, token.detach())  # type: ignore[no-untyped-call]


def send(
    x: Tensor,
    dst: int | None = None,
    *,
    token: Tensor | None = None,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send a tensor to one rank, which calls `recv`.

    Args:
        x: Any shape, dtype and strides.
        dst: The receiver's global rank.
        token: What the last `send` or `recv` of this rank gave: backward keeps their order.
        group_dst: The receiver's rank in the group, instead of `dst`.
        group: The default group, if None.

    Returns:
        A token. Give it to the next `send` or `recv`, and the last one to `tie`: without that,
        backward does not reach this call, and the receiver waits in its backward.
        `torch.autograd.grad` reaches only what depends on its inputs: there, let the first token do
        so (`0 * x.sum()`).

    Adjoint: `recv` of the cotangent.

    Raises:
        ArgumentError: No receiver or two, or it is this rank.

    Example:
        >>> from gradwire.collectives import recv, send, tie
        >>> def main():
        ...     x = torch.tensor([5.0], requires_grad=True)
        ...     if dist.get_rank() == 0:
        ...         token = send(x, dst=1)
        ...         tie(torch.zeros(()), token).backward()
        ...         return x.grad
        ...     y, token = recv(torch.empty(1), src=0)
        ...     tie((3 * y).sum(), token).backward()
        ...     return y.detach()
        >>> run_ranks(main, world_size=2)
        [tensor([3.]), tensor([5.])]
    """
    group = resolve_group(group)
    check_dense(x)
    to = _other(group, root_of(group, dst, group_dst, "dst"), "dst")
    return _Send.apply(x, _token(token), to, group)  # type: ignore[no-any-return, no-untyped-call]


def recv(
    like: Tensor,
    src: int | None = None,
    *,
    token: Tensor | None = None,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Receive a tensor from one rank, which calls `send`.

    Args:
        like: A tensor of the shape, dtype and device that is received; its values do not matter.
        src: The sender's global rank.
        token: What the last `send` or `recv` of this rank gave: backward keeps their order.
        group_src: The sender's rank in the group, instead of `src`.
        group: The default group, if None.

    Returns:
        The tensor and a token, as `send` gives one.

    Adjoint: `send` of the cotangent.

    Raises:
        ArgumentError: No sender or two, or it is this rank.
    """
    group = resolve_group(group)
    check_dense(like, "like")
    source = _other(group, root_of(group, src, group_src, "src"), "src")
    y, after = _Receive.apply(like.detach(), _token(token), source, group)  # type: ignore[no-untyped-call]
    return y, after


def tie(x: Tensor, token: Tensor) -> Tensor:
    """A copy of the tensor, whose backward also runs that of the calls that led to the token.

    Args:
        x: What backward is called on, or what goes into it.
        token: The last token of this rank.

    Adjoint: the identity; zero for the token.
    """
    check_dense(x)
    check_dense(token, "token")
    return _Tie.apply(x, token)  # type: ignore[no-any-return, no-untyped-call]


def send_recv(
    x: Tensor,
    dst: int | None = None,
    src: int | None = None,
    *,
    group_dst: int | None = None,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send a tensor to one rank while receiving another's, of the same shape, without deadlock.

    Only the ranks that send or receive something call it. If one asks for a gradient, let all that
    call it do so: no check can compare them, and its backward waits for theirs.

    Args:
        x: What is sent. Any shape, dtype and strides.
        dst: The receiver's global rank; None to send nothing.
        src: The sender's global rank; None to receive nothing.
        group_dst: The receiver's rank in the group, instead of `dst`.
        group_src: The sender's rank in the group, instead of `src`.
        group: The default group, if None.

    Returns:
        What was received; zeros if there is no sender.

    Adjoint: the same with `dst` and `src` swapped.

    Raises:
        ArgumentError: A rank that is not in the group, or is this one.

    Example:
        >>> from gradwire.collectives import send_recv
        >>> def main():
        ...     other = 1 - dist.get_rank()
        ...     return send_recv(torch.tensor([dist.get_rank()]), dst=other, src=other)
        >>> run_ranks(main, world_size=2)
        [tensor([1]), tensor([0])]

    Source:
        MPI standard, MPI_Sendrecv.
    """
    group = resolve_group(group)
    check_dense(x)
    to = rank_in_group(group, dst, group_dst, "dst")
    source = rank_in_group(group, src, group_src, "src")
    for rank, name in ((to, "dst"), (source, "src")):
        if rank is not None:
            _other(group, rank, name)
    return apply_linear(SendReceive(group, to, source), x)


def _token(token: Tensor | None) -> Tensor:
    """The token, or a first one; that requires a gradient, so that the graph is recorded."""
    if token is not None:
        return token
    return torch.zeros((), dtype=torch.float32, requires_grad=True)


def _other(group: ProcessGroup, rank: int, name: str) -> int:
    if rank == group.rank():
        raise ArgumentError(f"{name} is this rank itself ({rank} in the group): give another")
    return rank
