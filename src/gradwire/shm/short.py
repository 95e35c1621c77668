"""An all_reduce of short data in one tensor, prepared once for all tensors of its kind.

What an ordinary call works out again each time (checks, header, views of shared memory, how the op
is computed) takes longer than the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.recorder import Entry
from gradwire.shm.arithmetic import reducer
from gradwire.shm.group_segment import INLINE_BYTES
from gradwire.shm.group_state import GroupState
from gradwire.shm.header import Call

__all__ = ["Key", "Short", "Shorts"]

Key = tuple[torch.Size, torch.dtype, int]
"""Of a kind of calls: the tensor's shape and dtype, the reduce op's number."""
_KEPT = 256


class Short:
    """An all_reduce of ordinary tensors of one shape and dtype.

    Args:
        state: This rank's state of the group.
        key: Its kind; at most `INLINE_BYTES`, and not empty.

    Attributes:
        like: The recorder's entry of an earlier call.
    """

    __slots__ = ("_announce", "_reduce", "like")

    def __init__(self, state: GroupState, key: Key) -> None:
        shape, dtype, op = key
        call = Call("all_reduce", dtype, shape.numel(), op)
        self._announce: Callable[[Tensor], Sequence[Tensor]] = state.prepared(call, shape)
        self._reduce = reducer(op, state.size)
        self.like: Entry | None = None

    def __call__(self, tensor: Tensor) -> None:
        """Reduce a tensor, as a job of the group."""
        self._reduce(tensor, self._announce(tensor))


class Shorts:
    """The kinds of calls that a group has prepared: those that it was called for twice.

    Preparing takes as long as some calls do, which those of ever other sizes would not get back.

    Args:
        state: This rank's state of the group.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._of: dict[Key, Short | None] = {}
        self.get = self._of.get

    def meet(self, key: Key) -> Short | None:
        """Prepare a kind of calls that is not yet, if this is not the first of them."""
        if key in self._of:
            return self.make(key)
        if _is_short(key):
            self._keep(key, None)
        return None

    def make(self, key: Key) -> Short | None:
        """Prepare a kind of calls, if its data is short."""
        if not _is_short(key):
            return None
        made = Short(self._state, key)
        self._keep(key, made)
        return made

    def _keep(self, key: Key, made: Short | None) -> None:
        if len(self._of) >= _KEPT:
            self._of.clear()
        self._of[key] = made

    def clear(self) -> None:
        """Let go of the shared memory."""
        self._of.clear()


def _is_short(key: Key) -> bool:
    return 0 < key[0].numel() * key[1].itemsize <= INLINE_BYTES
