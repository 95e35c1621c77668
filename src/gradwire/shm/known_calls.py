"""An all_reduce of one tensor, prepared once for all tensors of its kind.

What an ordinary call works out again each time (checks, header, for short data also views of shared
memory and how the op is computed) takes longer than the exchange of short data, and as long as that
of 1 MiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.recorder import Entry
from gradwire.shm.arithmetic import reducer
from gradwire.shm.group_state import GroupState
from gradwire.shm.header import Call
from gradwire.shm.reduce_algorithms import place, reduce_placed

Key = tuple[torch.Size, torch.dtype, int]
"""Of a kind of calls: the tensor's shape and dtype, the reduce op's number."""
_KEPT = 256


class _Short:
    """An all_reduce of ordinary tensors of one shape and dtype, whose data travels with the header.

    Args:
        state: This rank's state of the group.
        key: Its kind; at most `inline_bytes`, and not empty.

    Attributes:
        like: The recorder's entry of an earlier call.
    """

    __slots__ = ("_exchange", "_reduce", "like")

    def __init__(self, state: GroupState, key: Key) -> None:
        shape, dtype, op = key
        call = Call("all_reduce", dtype, shape.numel(), op)
        self._exchange = state.short_exchange(call, shape)
        self._reduce = reducer(op, state.size)
        self.like: Entry | None = None

    def __call__(self, tensor: Tensor) -> None:
        """Reduce a tensor, as a job of the group."""
        self._reduce(tensor, self._exchange(tensor))


class _Long:
    """An all_reduce of ordinary tensors of one shape and dtype, which are longer.

    Args:
        state: This rank's state of the group.
        key: Its kind; more than `inline_bytes`.

    Attributes:
        like: The recorder's entry of an earlier call.
    """

    __slots__ = ("_announce", "_call", "_state", "like")

    def __init__(self, state: GroupState, key: Key) -> None:
        shape, dtype, op = key
        self._state, self._call = state, Call("all_reduce", dtype, shape.numel(), op)
        self._announce = state.announcer(self._call)
        self.like: Entry | None = None

    def __call__(self, tensor: Tensor) -> None:
        """Reduce a tensor, as a job of the group."""
        flat = tensor.view(-1)
        self._announce(place(self._state, flat))
        reduce_placed(self._state, self._call, flat)


KnownCall = _Short | _Long


class KnownCalls:
    """The kinds of calls that a group has prepared: those that it was called for twice.

    Preparing takes as long as some calls do, which those of ever other sizes would not get back.

    Args:
        state: This rank's state of the group.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._of: dict[Key, KnownCall | None] = {}
        self.get = self._of.get

    def meet(self, key: Key) -> KnownCall | None:
        """Prepare a kind of calls that is not yet, if this is not the first of them."""
        if key in self._of:
            return self._make(key)
        self._keep(key, None)
        return None

    def _make(self, key: Key) -> KnownCall | None:
        nbytes = _nbytes(key)
        if not nbytes:
            return None
        kind = _Short if nbytes <= self._state.inline_bytes else _Long
        made = kind(self._state, key)
        self._keep(key, made)
        return made

    def _keep(self, key: Key, made: KnownCall | None) -> None:
        if len(self._of) >= _KEPT:
            self._of.clear()
        self._of[key] = made

    def clear(self) -> None:
        """Let go of the shared memory."""
        self._of.clear()


def _nbytes(key: Key) -> int:
    return key[0].numel() * key[1].itemsize
