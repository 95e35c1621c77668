"""State of ranks that all share memory, with its collectives on 1-d contiguous tensors.

The operations check a caller's tensors and convert them. All their forms then reduce to the nine
collectives that `SharedMemory` has, and `AcrossHosts` for ranks on several hosts.

The setup of an ordinary all_reduce (checks, header, for short data also views of shared memory and
the function of the op) takes longer than the exchange of short data, and as long as that of 1 MiB.
So it is cached by shape, dtype and reduce op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.recorder import Entry
from gradwire.shm.algorithms import exchange as moving
from gradwire.shm.algorithms import reduce as reducing
from gradwire.shm.algorithms import rooted
from gradwire.shm.algorithms.arithmetic import check_reduction, reducer
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.algorithms.reduce import reduce_placed, stage
from gradwire.shm.memory.header import NUMBERS, Call

Key = tuple[torch.Size, torch.dtype, int]
"""Kind of calls: shape and dtype of the tensor, number of the reduce op."""
_KEPT = 256


class SharedMemory(GroupState):
    """State of ranks that all share memory; the functions of this package are its methods."""

    barrier = moving.barrier
    broadcast = moving.broadcast
    exchange = moving.exchange
    exchange_blocks = moving.exchange_blocks
    reduce = reducing.reduce
    reduce_scatter = reducing.reduce_scatter
    broadcast_list = rooted.broadcast_list
    gather = rooted.gather
    scatter = rooted.scatter


# --- all_reduce of one tensor, with its setup cached ---


class _Short:
    """all_reduce of ordinary tensors of one shape and dtype, with the data beside the header.

    Args:
        key: Kind of the calls; at most `inline_bytes`, not empty.

    Attributes:
        like: Recorder's entry of an earlier call.
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
    """all_reduce of ordinary tensors of one shape and dtype that are too long for the header.

    Args:
        key: Kind of the calls; more than `inline_bytes`.

    Attributes:
        like: Recorder's entry of an earlier call.
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
        self._announce(stage(self._state, flat))
        reduce_placed(self._state, self._call, flat)


KnownCall = _Short | _Long


class KnownCalls:
    """Cache of the setup of calls, from the second call of a kind on.

    The setup takes as long as some calls, which programs whose sizes always change would not
    regain.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._of: dict[Key, KnownCall | None] = {}

    def find(self, tensor: Tensor, op: int) -> KnownCall | None:
        """Return the setup for an ordinary tensor; None for the first call of its kind."""
        key = tensor.shape, tensor.dtype, op
        known = self._of.get(key)
        if known is None and tensor.dtype in NUMBERS:
            check_reduction(op, tensor.dtype)
            if key in self._of:
                return self._make(key)
            self._keep(key, None)
        return known

    def _make(self, key: Key) -> KnownCall | None:
        nbytes = key[0].numel() * key[1].itemsize
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
        """Release the shared memory."""
        self._of.clear()
