"""send, recv and send_recv, whose backwards run in an order that tokens define.

Messages between two ranks are matched by their order alone. Each call takes the token of the
previous call and returns one, and `tie` makes the loss depend on the last. Autograd therefore runs
the backwards of the calls on every rank in exactly the reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire._groups import rank_in_group
from gradwire._torch import nested_forward_mode
from gradwire.collectives import wire
from gradwire.collectives.consistency import unchecked
from gradwire.collectives.operation import Plan, received, register_plan, sent
from gradwire.collectives.validation import check_dense, resolve_group, root_of
from gradwire.errors import ArgumentError


@register_plan
@dataclass(frozen=True)
class SendReceive(Plan):
    """Tensor sent to one rank, and one received from another; zeros if there is no source."""

    destination: int | None
    source: int | None
    name = "send_recv"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        sent = None if self.destination is None else wire.send(x, self.destination, self.group)
        received = None if self.source is None else wire.receive(x, self.source, self.group)

        def finish() -> Tensor:
            result = wire.zeros_like(x) if received is None else received.wait()
            if sent is not None:
                sent.wait()
            return result

        return wire.Pending((), finish)

    def adjoint(self) -> SendReceive:
        return SendReceive(self.group, self.source, self.destination)


@register_plan
class Barrier(Plan):
    """Identity that waits for all ranks in both passes."""

    name = "barrier"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        wire.barrier(self.group)
        return wire.done(wire.contiguous_copy(x))

    def adjoint(self) -> Barrier:
        return self


class _Send(Function):
    """Send: from a tensor and a token to a token."""

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
        return received(cotangent), token, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, token: Tensor, *_: None) -> Tensor:
        return _Send.apply(tangent, token, ctx.to, ctx.group)  # type: ignore[no-any-return, no-untyped-call]


class _Receive(Function):
    """Receive: from a token to a tensor and a token."""

    @staticmethod
    def forward(like: Tensor, token: Tensor, source: int, group: ProcessGroup) -> Any:
        return wire.receive(like, source, group).wait(), token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.like, _, ctx.source, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, token: Tensor) -> Any:
        token = _Send.apply(sent(cotangent), token, ctx.source, ctx.group)  # type: ignore[no-untyped-call]
        return torch.zeros_like(cotangent) if ctx.needs_input_grad[0] else None, token, None, None

    @staticmethod
    def jvp(ctx: Any, _like: Any, token: Tensor, *_: None) -> Any:
        return _Receive.apply(ctx.like, token, ctx.source, ctx.group)  # type: ignore[no-untyped-call]


class _Tie(Function):
    """Make a tensor depend on a token: from both to the tensor."""

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
    """Make the first token of the backward's messages: a tensor becomes itself and the token."""

    @staticmethod
    def forward(x: Tensor, token: Tensor) -> Any:
        # The token depends on forward's last token, so that a second backward runs the messages of
        # forward after those of the first backward, on every rank.
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
    """Send a tensor to one rank, which must call `recv`.

    Args:
        x: Tensor of any shape, dtype and strides.
        dst: Receiver's global rank.
        token: Token returned by this rank's last `send` or `recv`, which orders their backwards.
        group_dst: Receiver's rank in the group, instead of `dst`.
        group: Process group; the default group if None.

    Returns:
        A token. Pass it to the next `send` or `recv`, and the last token to `tie`. Otherwise
        backward does not reach this call, and the receiver waits in its backward.
        `torch.autograd.grad` reaches only nodes that depend on its inputs: make the first token
        depend on them (`0 * x.sum()`).

    Adjoint: `recv` of the cotangent.

    Raises:
        ArgumentError: Neither or both of `dst` and `group_dst` are given, or it is this rank.

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
    if token is None:
        # It requires a gradient, so that the graph is recorded.
        token = torch.zeros((), dtype=torch.float32, requires_grad=True)
    return _Send.apply(x, token, to, group)  # type: ignore[no-any-return, no-untyped-call]


def recv(
    like: Tensor,
    src: int | None = None,
    *,
    token: Tensor | None = None,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Receive a tensor from one rank, which must call `send`.

    Args:
        like: Tensor of the shape, dtype and device to receive; its values are not read.
        src: Sender's global rank.
        token: Token returned by this rank's last `send` or `recv`, which orders their backwards.
        group_src: Sender's rank in the group, instead of `src`.
        group: Process group; the default group if None.

    Returns:
        The tensor, and a token to use as that of `send`.

    Adjoint: `send` of the cotangent.

    Raises:
        ArgumentError: Neither or both of `src` and `group_src` are given, or it is this rank.
    """
    group = resolve_group(group)
    check_dense(like, "like")
    source = _other(group, root_of(group, src, group_src, "src"), "src")
    if token is None:
        token = torch.zeros((), dtype=torch.float32, requires_grad=True)
    y, after = _Receive.apply(like.detach(), token, source, group)  # type: ignore[no-untyped-call]
    return y, after


def tie(x: Tensor, token: Tensor) -> Tensor:
    """Copy a tensor, whose backward then also runs those of the calls that led to the token.

    Args:
        x: Loss, or a tensor that the loss depends on.
        token: Last token of this rank.

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
    """Send a tensor to one rank while receiving one of the same shape, without deadlock.

    Only ranks that send or receive call this function. If one of them requires a gradient, all of
    them must: checks do not compare this call, and backward waits for the other ranks.

    Args:
        x: Tensor to send, of any shape, dtype and strides.
        dst: Receiver's global rank; None to send nothing.
        src: Sender's global rank; None to receive nothing.
        group_dst: Receiver's rank in the group, instead of `dst`.
        group_src: Sender's rank in the group, instead of `src`.
        group: Process group; the default group if None.

    Returns:
        The tensor received; zeros if there is no sender.

    Adjoint: send_recv with `dst` and `src` swapped.

    Raises:
        ArgumentError: A rank is not in the group, or is this rank.

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
    return SendReceive(group, to, source).apply(x, unchecked)


@overload
def barrier(x: None = ..., *, group: ProcessGroup | None = ...) -> None: ...
@overload
def barrier(x: Tensor, *, group: ProcessGroup | None = ...) -> Tensor: ...
def barrier(x: Tensor | None = None, *, group: ProcessGroup | None = None) -> Tensor | None:
    """Block until every rank of the group has called this function.

    Args:
        x: Tensor to copy to the result. Computation on the result runs after the barrier in
            forward, and before it in backward.
        group: Process group; the default group if None.

    Adjoint: the identity, after a barrier.

    Example:
        >>> from gradwire.collectives import barrier
        >>> run_ranks(barrier, world_size=2)
        [None, None]
    """
    group = resolve_group(group)
    if x is not None:
        check_dense(x)
        return Barrier(group).apply(x, unchecked)
    wire.barrier(group)
    return None


def _other(group: ProcessGroup, rank: int, name: str) -> int:
    if rank == group.rank():
        raise ArgumentError(f"{name} is this rank itself ({rank} in the group): give another rank")
    return rank
