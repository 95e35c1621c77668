"""Consistency checks: before any data is sent, ranks all_gather the signatures of their calls.

With different sizes, Gloo terminates the process, and other backends hang or mix data. With checks
on, each rank first sends a signature, a row of integers of fixed length: the arguments that must be
equal, whether a gradient is required, and how many rows it sends to each rank. All ranks compare
the same rows, so that either all raise or none does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire._groups import COMPARED_CALLS
from gradwire.collectives import wire
from gradwire.collectives.validation import Sizes, refuse_in_transforms
from gradwire.errors import ArgumentError, ArgumentTypeError, MismatchError
from gradwire.recorder import record_error

MAX_DIMS = 8
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
ABSENT = -1
"""Number of dims, and dtype, on a rank that receives them from the root."""


class CallSignature(NamedTuple):
    """Signature of a rank's call of a collective; a tuple is fast to construct and to hash."""

    op: str
    # The split dim is in front. None, like the dtype, if only the root knows it.
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    # 1 if this rank records a graph node, 0 if not, -1 if it cannot.
    wants_grad: int = 0
    reduce: str = ""
    root: int = -1
    # Text of other arguments that must be equal.
    detail: str = ""
    # True if the sizes of the first dim may differ between ranks.
    ragged: bool = False
    # Rows to and from each rank, -1 if unknown.
    send: Sequence[int] = ()
    receive: Sequence[int] = ()
    # Number of the forward call in its backward, -1 in forward.
    origin: int = -1


@dataclass(frozen=True)
class PeerSignature:
    """Signature received from a rank; the shape is None if it has more than `MAX_DIMS` dims."""

    wants_grad: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    send: list[int]


# A row: _HEAD single numbers, MAX_DIMS sizes, then rows to and from each rank.
_FIELDS = (
    "call",
    "order of backward",
    "op",
    "reduce op",
    "root",
    "dtype",
    "detail",
    "dims",
    "grad",
)
_HEAD = len(_FIELDS)


def encode(call: CallSignature, number: int, world: int) -> list[int]:
    """Encode a signature as integers, the same number of them on every rank."""
    shape = call.shape
    dims = list(shape or ())
    if len(dims) > MAX_DIMS:
        dims = [*dims[: MAX_DIMS - 1], _hash(tuple(dims[MAX_DIMS - 1 :]))]
    dims += [0] * (MAX_DIMS - len(dims))
    return [
        number,
        call.origin,
        _hash(call.op),
        _hash(call.reduce),
        call.root,
        ABSENT if call.dtype is None else _DTYPES.index(call.dtype),
        _hash(call.detail),
        ABSENT if shape is None else len(shape),
        call.wants_grad,
        *dims,
        *(call.send or [-1] * world),
        *(call.receive or [-1] * world),
    ]


@lru_cache(maxsize=4096)
def signature_hash(call: CallSignature) -> int:
    """Return a hash of a signature that is equal in all processes of a host."""
    return hash(tuple(encode(call, 0, 1)))


def decode(row: Sequence[int], world: int) -> PeerSignature:
    """Decode the signature that a rank sent."""
    dtype, dims = row[_FIELDS.index("dtype")], row[_FIELDS.index("dims")]
    return PeerSignature(
        wants_grad=row[_FIELDS.index("grad")],
        shape=tuple(row[_HEAD : _HEAD + dims]) if ABSENT < dims <= MAX_DIMS else None,
        dtype=None if dtype == ABSENT else _DTYPES[dtype],
        send=list(row[_HEAD + MAX_DIMS : _HEAD + MAX_DIMS + world]),
    )


@lru_cache(maxsize=4096)
def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def first_difference(rows: list[list[int]], ragged: bool) -> str | None:
    """Return the name of the first field that must be equal and is not, or None."""
    dims, grad, world = _FIELDS.index("dims"), _FIELDS.index("grad"), len(rows)
    for i, name in enumerate(_FIELDS[:dims]):
        if len({row[i] for row in rows if name != "dtype" or row[i] != ABSENT}) > 1:
            return name
    present = [row for row in rows if row[dims] != ABSENT]
    if len({(row[dims], *row[_HEAD + ragged : _HEAD + MAX_DIMS]) for row in present}) > 1:
        return "shape"
    if {1, -1} <= {row[grad] for row in rows}:
        return "requires-grad"
    # Each rank must send as many rows as the receiver expects.
    sends = [row[_HEAD + MAX_DIMS : _HEAD + MAX_DIMS + world] for row in rows]
    receives = [row[_HEAD + MAX_DIMS + world :] for row in rows]
    pairs = [(sends[s][r], receives[r][s]) for s in range(world) for r in range(world)]
    return None if all(-1 in pair or pair[0] == pair[1] for pair in pairs) else "splits"


def description(field: str, call: CallSignature, number: int) -> str:
    """Return a field's value for error messages; `number` counts the group's compared calls."""
    gradients = {1: "requires grad", 0: "does not require grad", -1: "gradients are disabled here"}
    texts = {
        "shape": f"{call.shape}" + (" (the first size may differ)" if call.ragged else ""),
        "dtype": str(call.dtype),
        "reduce op": call.reduce or "none",
        "root": str(call.root),
        "detail": call.detail or "none",
        "splits": f"sends {list(call.send)}, expects {list(call.receive)}",
        "requires-grad": gradients[call.wants_grad],
        "call": f"{call.op}, the group's call {number} that ranks compare",
    }
    own = call.op if call.origin < 0 else f"{call.op}, the group's call {call.origin}"
    return texts.get(field, own)


class Refusal(NamedTuple):
    """Type and message of an argument error; the error's own traceback would keep tensors alive."""

    kind: type[ArgumentError | ArgumentTypeError]
    message: str


_setting: ContextVar[bool | None] = ContextVar("gradwire_checks", default=None)


@contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Context manager that switches the consistency checks of collectives on or off.

    With checks on, ranks compare their calls before each collective, in forward and backward. A
    disagreement raises `MismatchError` on every rank, instead of hanging, terminating the process
    or mixing data. A gradient that only some ranks require is computed on all. Use the same setting
    on every rank. The argument `check` of a collective takes precedence over this setting, which
    takes precedence over the environment variable `GRADWIRE_CHECKS` (0 or 1).

    Checks are off by default: each costs about as much as a collective of 200 bytes. The "shm"
    backend always compares op, reduction, root, dtype and sizes in the headers of its messages.
    Unless checks are switched off, it also compares the rest of the signature, except for
    `scatter`, and for `vary` and `invariant`, which send no message.

    `barrier`, `send`, `recv` and `send_recv` are never compared. Only some ranks call the latter
    three: require gradients on all of these ranks, or on none.

    Example:
        Rank 1 has one element more than rank 0.

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


def requested(check: bool | None) -> bool | None:
    """Return True or False if checks were switched on or off for this call, None if neither."""
    if torch.compiler.is_compiling():
        return False  # all ranks run the same graph
    if check is None:
        check = _setting.get()
    if check is not None:
        return check
    value = os.environ.get("GRADWIRE_CHECKS")
    if value and value not in ("0", "1"):
        raise ArgumentError(f"the environment variable GRADWIRE_CHECKS is {value!r}: give 0 or 1")
    return value == "1" if value else None


CheckContext: TypeAlias = Callable[[Tensor], AbstractContextManager[None]]
"""Comparison of a backward, by its cotangent; returns a context in which to start it."""


def unchecked(cotangent: Tensor) -> AbstractContextManager[None]:
    """Compare nothing."""
    return nullcontext()


def _compare_backward(
    group: ProcessGroup, name: str, number: int, cotangent: Tensor
) -> AbstractContextManager[None]:
    """Exchange the backward's signature, which has the number of the forward call."""
    op, shape = f"backward of {name}", tuple(cotangent.shape)
    exchange(group, CallSignature(op, shape, cotangent.dtype, ragged=True, origin=number))
    return nullcontext()


def agree(
    group: ProcessGroup, x: Tensor, call: CallSignature
) -> tuple[Tensor, CheckContext, list[PeerSignature]]:
    """Exchange signatures; `x` then requires a gradient if it does on any rank."""
    rows, number = exchange(group, call)
    if not x.requires_grad and any(row.wants_grad == 1 for row in rows):
        refuse_in_transforms("a receiver without a tensor", "give every rank a tensor")
        x = x.detach().requires_grad_()
    return x, partial(_compare_backward, group, call.op, number), rows


def agree_with_root(
    group: ProcessGroup,
    x: Tensor | None,
    call: CallSignature,
    root: int,
    refusal: Refusal | None = None,
) -> tuple[Tensor, CheckContext, list[PeerSignature]]:
    """Exchange signatures as `agree` does, for calls in which only the root needs a tensor."""
    own, context, peers = agree(
        group, torch.empty((), dtype=torch.float32) if x is None else x, call
    )
    # The root's arguments cannot be used: raise its error on every rank.
    if peers[root].dtype is None:
        _raise_refusal(group, root, call.op, refusal)
    if any(peer.dtype is None for peer in peers):
        shape, dtype = peers[root].shape, peers[root].dtype
        if shape is None:
            raise ArgumentError(
                f"the root's tensor has more than {MAX_DIMS} dims, too many for its signature: "
                "give every rank a tensor of the shape it will receive"
            )
        refuse_in_transforms("a receiver without a tensor", "give every rank a tensor")
        if x is None:
            # Requires a gradient if any rank does, so that all ranks run the same backward.
            own = wire.placeholder(shape, dtype, own.requires_grad, group)
    return own, context, peers


def tensor_fields(x: Tensor) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Return a tensor's fields of a `CallSignature`: shape, dtype and `wants_grad`."""
    return tuple(x.shape), x.dtype, wants_grad(x)


def gather_signature(
    op: str, front: Tensor, sizes: Sizes, detail: str, group: ProcessGroup, root: int = -1
) -> CallSignature:
    """Return the signature of a call that gathers the rows of `front`."""
    listed = list(sizes) if isinstance(sizes, tuple) else sizes
    detail, ragged = f"{detail}, sizes={listed}", sizes is not None
    call = CallSignature(op, *tensor_fields(front), root=root, detail=detail, ragged=ragged)
    world = group.size()
    if not isinstance(listed, list) or [*map(type, listed)] != [int] * world:
        return call  # what else is wrong with the sizes is the same on all ranks
    return call._replace(send=(front.shape[0],) * world, receive=tuple(listed))


def wants_grad(x: Tensor | None) -> int:
    """Return 1 if a graph node will be recorded for the tensor, -1 if it cannot be, else 0."""
    if x is None:
        return 0 if torch.is_grad_enabled() else -1
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    if not torch.is_grad_enabled():
        return -1
    # Neither a tensor created in inference mode, nor one inside a transform, can be made to
    # require a gradient.
    fixed = x.is_inference() or torch._C._are_functorch_transforms_active()
    return 1 if x.requires_grad else -int(fixed)


def exchange(group: ProcessGroup, call: CallSignature) -> tuple[list[PeerSignature], int]:
    """Exchange signatures; return those of all ranks, and this call's number in the group."""
    number, world = next(COMPARED_CALLS.setdefault(group, count())), group.size()
    rows = wire.gather_ints(encode(call, number, world), group)
    field = first_difference(rows, call.ragged)
    if field is not None:
        _raise_mismatch(group, field, call, number)
    return [decode(row, world) for row in rows], number


def _raise_mismatch(group: ProcessGroup, field: str, call: CallSignature, number: int) -> NoReturn:
    """Gather the ranks' values of a field, and raise an error that lists them."""
    values = gather_different(description(field, call, number), group)
    held = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    error = MismatchError(
        f"{call.op}: ranks disagree on {field}: {held}. No data was sent; make the same calls in "
        "the same order on every rank of the group",
        values,
    )
    record_error(error, group=group)
    raise error


def _raise_refusal(group: ProcessGroup, root: int, op: str, refusal: Refusal | None) -> NoReturn:
    """Send the root's argument error to all ranks, and raise it on each."""
    if refusal is None:
        refusal = Refusal(ArgumentError, "")
    is_type_error = issubclass(refusal.kind, ArgumentTypeError)
    text = gather_texts(f"{int(is_type_error)}{refusal.message}", group, 1000)[root]
    if group.rank() != root:
        kind = ArgumentTypeError if text.startswith("1") else ArgumentError
        refusal = Refusal(kind, f"{op}, on rank {root} of the group: {text[1:]}")
    error = refusal.kind(refusal.message)
    record_error(error, group=group)
    raise error


_SHOWN = 200
_LONGEST = 1 << 16
"""Maximum number of bytes sent of a text; each is sent as an integer."""


def gather_different(text: str, group: ProcessGroup) -> list[str]:
    """Return each rank's text; long texts are cut to the part around the first difference."""
    size = max(size for (size,) in wire.gather_ints([len(text.encode())], group))
    texts = gather_texts(text, group, min(size, _LONGEST))
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, column in columns if len({*column}) > 1), min(map(len, texts)))
    start = max(0, same - _SHOWN // 2) if max(map(len, texts)) > _SHOWN else 0
    return ["… " * (start > 0) + text[start : start + _SHOWN] for text in texts]


def gather_texts(text: str, group: ProcessGroup, size: int) -> list[str]:
    """Return each rank's text, cut to `size` bytes."""
    everyone = wire.gather_ints(list(text.encode()[:size].ljust(size)), group)
    return [bytes(row).decode(errors="replace").rstrip() for row in everyone]
