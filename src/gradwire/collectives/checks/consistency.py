"""Consistency checks: before data is sent, ranks all_gather the signatures of their calls.

Gloo ends the process when sizes differ, other backends hang or mix data. With checks on, each rank
first sends a signature, a row of integers of fixed length: the arguments that must be equal,
whether a gradient is wanted, and how many rows it sends to each rank. All ranks compare the same
rows, so that all raise or none does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.validation import refuse_in_transforms
from gradwire.collectives.checks.call_signature import (
    MAX_DIMS,
    CallSignature,
    PeerSignature,
    decode,
    description,
    encode,
    first_difference,
    in_full,
)
from gradwire.collectives.wire.backends import dense, in_bytes, placeholder
from gradwire.collectives.wire.movement import gather_ints
from gradwire.errors import ArgumentError, ArgumentTypeError, MismatchError
from gradwire.recorder import failed

ENVIRONMENT = "GRADWIRE_CHECKS"


class Refusal(NamedTuple):
    """Why a rank's arguments cannot be used; not the error, whose traceback would hold tensors."""

    kind: type[ArgumentError | ArgumentTypeError]
    message: str


_setting: ContextVar[bool | None] = ContextVar("gradwire_checks", default=None)
_numbers: WeakKeyDictionary[ProcessGroup, count[int]] = WeakKeyDictionary()


@contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Switch the consistency checks of collectives on, or off, within a block.

    With checks on, ranks compare before each collective, forward and backward, what they are about
    to do; a disagreement raises `MismatchError` on every rank instead of hanging, ending the
    process or mixing data, and a gradient that only some ranks ask for is computed on all.
    Switch them on every rank alike. An argument `check` goes before this, and this before the
    environment variable `GRADWIRE_CHECKS` (0 or 1). By default they are off, and nothing is sent
    besides the data: each costs about as much as a collective of 200 bytes. The "shm" backend
    compares op, reduction, root, dtype and sizes in the headers of its messages, always; and,
    unless checks are switched off, the rest of the signature, but not that of `scatter`, nor of
    `vary` and `invariant`, which have no message. Never compared are `barrier`, and `send`, `recv`
    and `send_recv`, which only some ranks call: there, ask for gradients on all that call them.

    Example:
        Rank 1 holds one number more than rank 0.

        >>> from gradwire.collectives import all_reduce, checks
        >>> from gradwire.errors import MismatchError
        >>> def main():
        ...     with checks():
        ...         try:
        ...             all_reduce(torch.ones(2 + dist.get_rank()))
        ...         except MismatchError as error:
        ...             return str(error).split(":")[1].strip()
        >>> run_ranks(main, world_size=2)
        ['ranks disagree on shape', 'ranks disagree on shape']
    """
    token = _setting.set(on)
    try:
        yield
    finally:
        _setting.reset(token)


def enabled(check: bool | None) -> bool:
    """Whether checks are on for this call."""
    return requested(check) is True


def requested(check: bool | None) -> bool | None:
    """Whether checks are on for this call; None if they were neither switched on nor off."""
    if torch.compiler.is_compiling():
        return False  # all ranks run the same graph
    if check is None:
        check = _setting.get()
    return _from_environment() if check is None else check


def _from_environment() -> bool | None:
    value = os.environ.get(ENVIRONMENT)
    if value and value not in ("0", "1"):
        raise ArgumentError(f"the environment variable {ENVIRONMENT} is {value!r}: give 0 or 1")
    return value == "1" if value else None


class CheckContext:
    """What a call saves for its backward: nothing here, so that neither is checked."""

    def backward(self, cotangent: Tensor) -> AbstractContextManager[None]:
        """Compare with the other ranks which call's backward this is, and of what.

        Returns:
            A context manager, within which to start the backward's collective.

        Raises:
            MismatchError: On every rank, if one runs its backwards in another order.
        """
        return nullcontext()


UNCHECKED = CheckContext()


@dataclass(frozen=True)
class Checked(CheckContext):
    """Of a checked call: its backward is checked too."""

    group: ProcessGroup
    call: str
    number: int

    def backward(self, cotangent: Tensor) -> AbstractContextManager[None]:
        """Exchange the backward's signature, with the number of the call that it is of."""
        exchange(
            self.group,
            CallSignature(
                f"backward of {self.call}",
                tuple(cotangent.shape),
                cotangent.dtype,
                ragged=True,
                origin=self.number,
            ),
        )
        return nullcontext()


def agree(
    group: ProcessGroup, x: Tensor, call: CallSignature
) -> tuple[Tensor, CheckContext, list[PeerSignature]]:
    """Exchange signatures; `x` then requires a gradient if it does on any rank.

    Returns:
        The tensor, the context for backward, and the ranks' signatures.

    Raises:
        MismatchError: On every rank, if they disagree.
        NotSupportedError: Another rank wants a gradient, within torch.func's transforms.
    """
    rows, number = exchange(group, call)
    if not x.requires_grad and any(row.wants_grad == 1 for row in rows):
        refuse_in_transforms("a gradient that another rank asks for", "ask for it on all")
        x = x.detach().requires_grad_()
    return x, Checked(group, call.op, number), rows


def agree_with_root(
    group: ProcessGroup,
    x: Tensor | None,
    call: CallSignature,
    root: int,
    refusal: Refusal | None = None,
) -> tuple[Tensor, CheckContext, list[PeerSignature]]:
    """`agree`, where ranks without a tensor get a placeholder of the root's shape and dtype.

    Args:
        group: The group.
        x: The tensor, if this rank has one.
        call: What the ranks compare.
        root: The root, in the group.
        refusal: On the root, why it has no tensor.

    Raises:
        ArgumentError, ArgumentTypeError: On every rank, if the root's arguments are refused, or
            its signature has no room for its shape.
        MismatchError: On every rank, if they disagree.
        NotSupportedError: A rank has no tensor, within torch.func's transforms.
    """
    own, context, peers = agree(
        group, torch.empty((), dtype=torch.float32) if x is None else x, call
    )
    if peers[root].dtype is None:
        _raise_refusal(group, root, call.op, refusal)
    if any(peer.dtype is None for peer in peers):
        shape, dtype = peers[root].shape, peers[root].dtype
        if shape is None:
            raise ArgumentError(
                f"the root's tensor has more than {MAX_DIMS} dims, too many for its signature: "
                "give every rank a tensor of what it will receive"
            )
        refuse_in_transforms("a receiver without a tensor", "give every rank a tensor")
        if x is None:
            # It requires a gradient where any rank wants one: the backwards are the same on all.
            own = placeholder(shape, dtype, own.requires_grad, group)
    return own, context, peers


def tensor_fields(x: Tensor) -> tuple[tuple[int, ...], torch.dtype, int]:
    """What a `CallSignature` says of a tensor: shape, dtype, and whether it wants a gradient."""
    return tuple(x.shape), x.dtype, wants_grad(x)


def digest(x: Tensor) -> str:
    """A short text that differs, all but surely, where the tensor's values do."""
    own = dense(x.detach()).cpu()
    data = in_bytes(own, (own.numel(),)).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def wants_grad(x: Tensor) -> int:
    """For `CallSignature`: 1 if a graph node will be made, -1 if none can be, 0 else."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    # A tensor made in inference mode cannot be made to require a gradient.
    possible = torch.is_grad_enabled() and not x.is_inference()
    return int(x.requires_grad) if possible else -1


def grad_mode() -> int:
    """`wants_grad` of a rank that has no tensor."""
    return 0 if torch.is_grad_enabled() else -1


def next_number(group: ProcessGroup) -> int:
    """How many calls of the group were compared before this one; equal on all ranks."""
    return next(_numbers.setdefault(group, count()))


def exchange(group: ProcessGroup, call: CallSignature) -> tuple[list[PeerSignature], int]:
    """All ranks' signatures, and this call's number in the group.

    Raises:
        MismatchError: On every rank, if they disagree.
    """
    call, number, world = in_full(call), next_number(group), group.size()
    rows = gather_ints(encode(call, number, world), group)
    field = first_difference(rows, call.ragged)
    if field is not None:
        _raise_mismatch(group, field, call, number)
    return [decode(row, world) for row in rows], number


def _raise_mismatch(group: ProcessGroup, field: str, call: CallSignature, number: int) -> NoReturn:
    """Exchange the ranks' values of a field, and raise with all of them."""
    values = gather_different(description(field, call, number), group)
    held = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    error = MismatchError(
        f"{call.op}: ranks disagree on {field}: {held}. Nothing was sent; give every rank of the "
        "group the same call in the same order",
        values,
    )
    failed(error, group=group)
    raise error


def _raise_refusal(group: ProcessGroup, root: int, op: str, refusal: Refusal | None) -> NoReturn:
    """Send the root's refusal to all ranks, and raise it there."""
    if refusal is None:
        refusal = Refusal(ArgumentError, "")
    is_type_error = issubclass(refusal.kind, ArgumentTypeError)
    text = gather_texts(f"{int(is_type_error)}{refusal.message}", group, 1000)[root]
    if group.rank() != root:
        kind = ArgumentTypeError if text.startswith("1") else ArgumentError
        refusal = Refusal(kind, f"{op}, on rank {root} of the group: {text[1:]}")
    error = refusal.kind(refusal.message)
    failed(error, group=group)
    raise error


_SHOWN = 200
_LONGEST = 1 << 16
"""Bytes that are sent of a text; each is an int on the wire."""


def gather_different(text: str, group: ProcessGroup) -> list[str]:
    """Each rank's text; of long ones what is around the first difference."""
    size = max(size for (size,) in gather_ints([len(text.encode())], group))
    texts = gather_texts(text, group, min(size, _LONGEST))
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, column in columns if len({*column}) > 1), min(map(len, texts)))
    start = max(0, same - _SHOWN // 2) if max(map(len, texts)) > _SHOWN else 0
    return ["… " * (start > 0) + text[start : start + _SHOWN] for text in texts]


def gather_texts(text: str, group: ProcessGroup, size: int) -> list[str]:
    """Each rank's text, of which so many bytes are sent."""
    everyone = gather_ints(list(text.encode()[:size].ljust(size)), group)
    return [bytes(row).decode(errors="replace").rstrip() for row in everyone]
