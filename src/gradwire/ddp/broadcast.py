"""Coalesced broadcast, and the synchronization of a module's buffers.

Sizes and dtypes alone determine which tensors share a message, so that all ranks agree even if
strides differ. A message is either a pack of small tensors, which passes through a staging buffer,
or a piece of a large tensor, which is sent from and received into the tensor itself. At most two
messages are in flight.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from gradwire._groups import check_group, rank_in_group
from gradwire._scope import outside_contexts
from gradwire.buckets import plan_buckets
from gradwire.ddp.arguments import (
    check_not_expanded,
    in_attributes,
    inner_tensors,
    watch_registrations,
)
from gradwire.ddp.buckets.ownership import holders, uses
from gradwire.ddp.faults.error_channel import broadcast_options, waits_on_cpu
from gradwire.ddp.faults.fault_domain import FaultDomain, wait_for_message
from gradwire.errors import ArgumentError, ArgumentTypeError, BrokenGroupError, MismatchError
from gradwire.shm import Operations, shm_backend_of

IN_FLIGHT = 2
IN_PLACE_BYTES = 1 << 20
"""Size from which a separate message costs less than copies to and from a staging buffer."""
MESSAGE_BYTES = 32 << 20
"""Maximum size of a message. Copying one message overlaps with sending another."""


def broadcast_coalesced(
    group: ProcessGroup,
    tensors: Sequence[Tensor],
    buffer_size: int = 250 << 20,
    src: int | None = None,
    *,
    group_src: int | None = None,
) -> None:
    """Overwrite tensors on all ranks of a group with the root's values.

    The broadcast is between processes, in place and without gradients, like
    `torch.distributed._broadcast_coalesced`. `gradwire.devices.broadcast_coalesced` copies between
    the devices of one process.

    At most two messages are in flight, so staging takes at most 2 × `buffer_size` bytes.
    Contiguous tensors of 1 MiB and more are sent and received in place, without a copy. Smaller
    ones are packed, with one copy on the root and one on each receiver.

    Args:
        group: Process group. Every rank of it calls with tensors of the same shapes and dtypes, in
            the same order.
        tensors: Tensors of any dtypes and strides, on devices that the group supports. They are
            written in place on all ranks but the root; empty tensors are skipped.
        buffer_size: Maximum number of bytes packed into one message, > 0.
        src: Global rank of the root. Rank 0 of the group if neither rank is given.
        group_src: Rank of the root in the group, instead of `src`.

    Raises:
        ArgumentError: A size, a rank or a tensor's layout is not valid; nothing was sent.
        ArgumentTypeError: `group` is not a process group, or `tensors` has something else.
        PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not call in time.

    Example:
        Rank 0 holds [1, 2] and [[3]], rank 1 zeros. Afterwards both hold [1, 2] and [[3]].

        >>> import torch, torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     first = dist.get_rank() == 0
        ...     a = torch.tensor([1.0, 2.0]) if first else torch.zeros(2)
        ...     b = torch.tensor([[3]]) if first else torch.zeros(1, 1, dtype=torch.int64)
        ...     broadcast_coalesced(dist.group.WORLD, [a, b])
        ...     return a.tolist(), b.tolist()
        >>> run_ranks(main, world_size=2)
        [([1.0, 2.0], [[3]]), ([1.0, 2.0], [[3]])]
    """
    check_group(group)
    root = rank_in_group(group, src, group_src, "src") or 0
    _check(tensors, buffer_size)
    _broadcast(group, root, tensors, buffer_size)


def broadcast_values(
    group: ProcessGroup, named: Iterable[tuple[str, Tensor]], *, group_src: int = 0
) -> None:
    """Overwrite a module's tensors on all ranks of a group with the root's values."""
    # Unlike `broadcast_coalesced`, this accepts expanded tensors, of which each element in memory
    # is sent once, and tensors made in inference mode.
    named = list(named)
    for name, t in named:
        if t.layout is not torch.strided:
            raise ArgumentError(
                f"{name} has layout {t.layout}, which cannot be broadcast: keep it out of the "
                "module, or name it in the module's _ddp_params_and_buffers_to_ignore"
            )
    tensors = [t for _, t in named]
    with torch.inference_mode() if any(t.is_inference() for t in tensors) else nullcontext():
        _broadcast(group, group_src, [distinct(t) for t in tensors])


def distinct(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that has each element in memory once."""
    if tensor.is_contiguous():  # the common case
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _broadcast(
    group: ProcessGroup, root: int, tensors: Sequence[Tensor], buffer_size: int = 250 << 20
) -> None:
    tensors = [inner for tensor in tensors for inner in inner_tensors(tensor)]
    member = shm_backend_of(group)
    if member is not None and all(t.is_cpu for t in tensors):
        _send_as_stream(group, member, root, tensors)
        return
    wire = _Wire(group, root)
    with torch.no_grad():
        for indices in _messages(tensors, buffer_size):
            if len(indices) == 1 and tensors[indices[0]].nbytes >= IN_PLACE_BYTES:
                wire.send_large(tensors[indices[0]])
            else:
                wire.send_packed([tensors[i] for i in indices])
        wire.drain()


def _send_as_stream(
    group: ProcessGroup, member: Operations, root: int, tensors: Sequence[Tensor]
) -> None:
    """Broadcast all tensors in one operation: shared memory needs no messages and no staging."""
    # bypasses PyTorch's dispatcher, which would pass copies of lazily conjugated or negated
    # tensors, and would not copy the results back
    options = broadcast_options(root)
    options.asyncOp = False
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return
    try:
        with torch.no_grad():
            member.broadcast(filled, options).wait()
    except BrokenGroupError as error:
        # a message between two backwards, for which nobody has waited yet, may have failed first
        domain = FaultDomain.known(group)
        if domain is None or domain.broken is not None:
            raise
        raise domain.cause(error) from error


def _messages(tensors: Sequence[Tensor], buffer_size: int) -> Sequence[Sequence[int]]:
    """Return the indices of the tensors in each message: large ones alone, no empty ones."""
    sizes = [t.nbytes for t in tensors]
    # On the CPU a message has tensors of several dtypes, such as all buffers of batch norm: in this
    # order each begins at a multiple of its element's size. Accelerators copy lists of one dtype.
    filled = [i for i, size in enumerate(sizes) if size]
    filled.sort(key=lambda i: tensors[i].dtype.itemsize, reverse=True)
    plan = plan_buckets(
        [sizes[i] for i in filled],
        [torch.uint8 if tensors[i].is_cpu else tensors[i].dtype for i in filled],
        [tensors[i].device for i in filled],
        [min(buffer_size, MESSAGE_BYTES)],
        alone=[size >= IN_PLACE_BYTES for size in sizes],
        indices=filled,
    )
    return plan.buckets


@dataclass
class _Message:
    """A message in flight, with the copies to make once it has arrived."""

    work: Work
    wire: Tensor
    arrived: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


class _Wire:
    """Sends messages, at most `IN_FLIGHT` at a time, and unpacks them as they arrive."""

    def __init__(self, group: ProcessGroup, root: int) -> None:
        self._group = group
        self._is_root = group.rank() == root
        self._options = broadcast_options(root)
        self._in_flight: deque[_Message] = deque()

    def send_large(self, tensor: Tensor) -> None:
        """Send one tensor in pieces, in place if it is contiguous."""
        in_place = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if in_place:
            flat = tensor.view(-1)
        elif self._is_root:
            flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        else:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        for piece in flat.view(torch.uint8).split(MESSAGE_BYTES):
            message = self._send(piece)
        if not self._is_root:
            if in_place and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            else:
                message.arrived, message.targets = [flat.view(tensor.shape)], [tensor]

    def send_packed(self, tensors: list[Tensor]) -> None:
        """Send several tensors of one device through a staging buffer."""
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_one()
        dtypes = {t.dtype for t in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        if self._is_root:
            flats = [t if t.dtype is dtype else _bytes(t) for t in tensors]
            self._send(torch.cat([t.flatten() for t in flats]).view(torch.uint8))
            return
        counts = [t.nbytes // dtype.itemsize for t in tensors]
        flat = torch.empty(sum(counts), dtype=dtype, device=tensors[0].device)
        message = self._send(flat.view(torch.uint8))
        pieces = zip(flat.split(counts), tensors, strict=True)  # overlaps with the transfer
        typed = [(p if t.dtype is dtype else p.view(t.dtype), t) for p, t in pieces]
        message.arrived = [p if t.dim() == 1 else p.view(t.shape) for p, t in typed]
        message.targets = tensors

    def drain(self) -> None:
        while self._in_flight:
            self._finish_one()

    def _send(self, wire: Tensor) -> _Message:
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_one()
        message = _Message(self._group.broadcast([wire], self._options), wire)
        self._in_flight.append(message)
        return message

    def _finish_one(self) -> None:
        message = self._in_flight.popleft()
        on_cpu = waits_on_cpu(self._group, message.wire.device)
        what = "broadcast_coalesced"
        wait_for_message(self._group, message.work, what, on_cpu=on_cpu, since=message.since)
        if any(t.is_conj() or t.is_neg() for t in message.targets):
            for target, arrived in zip(message.targets, message.arrived, strict=True):
                target.copy_(arrived)  # _foreach_copy_ rejects lazy conjugates
        elif message.targets:
            torch._foreach_copy_(message.targets, message.arrived)


def _check(tensors: Sequence[Tensor], buffer_size: int) -> None:
    if not isinstance(buffer_size, int) or buffer_size <= 0:
        raise ArgumentError(f"buffer_size is {buffer_size!r}: pass a number of bytes above 0")
    for i, t in enumerate(tensors):
        if isinstance(t, Tensor) and t.layout is torch.strided and t.is_contiguous():
            continue  # the common case, tested first as lists may be long
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"tensors[{i}] is a {type(t).__name__}: pass tensors")
        if t.layout != torch.strided:
            raise ArgumentError(
                f"tensors[{i}] has layout {t.layout}: broadcast its dense parts instead"
            )
        check_not_expanded(t, f"tensors[{i}]")


BufferHook = Callable[[dict[str, Tensor], ProcessGroup], Any]
"""Function that changes buffers in place, given by name. It may return futures to wait for."""


class Buffers:
    """The current buffers of a module, without the ignored ones."""

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self._ignored = module, ignored
        # merges the buffers; None if all ranks take rank 0's values
        self.hook: BufferHook | None = None
        # True if the hook runs after each training forward instead of before it
        self.after_forward = False
        self._left_out = [b for n, b in module.named_buffers() if n in ignored]
        # ids, not weak references: `torch.utils.swap_tensors` refuses a tensor that has one
        self._seen: set[int] = set()
        self._aliased: set[int] = set()
        self._find()
        watch_registrations(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": set(), "_changed": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        watch_registrations(self)

    def __bool__(self) -> bool:
        if self._changed:
            self._find()
        return bool(self._paths)

    def on_registration(self, module: nn.Module, name: str, value: Any) -> None:
        """Look for buffers again, if a module has a new one or a new child."""
        # `named_buffers` at each forward would take three times as long as looking up names. A
        # value that replaces an existing buffer is found by its name.
        if not isinstance(value, nn.Parameter | None) and module._buffers.get(name) is None:
            self._changed = True

    def _find(self) -> None:
        self._changed = False
        # modules may have been renamed since, by a new Sequential around them
        left_out = {id(b) for b in self._left_out}
        named = [(n, b) for n, b in self._module.named_buffers() if n not in self._ignored]
        named = [(n, b) for n, b in named if id(b) not in left_out]
        self._paths = {name: name.split(".") for name, _ in named}
        # The first answer is kept. C++ references to a buffer that was found later may be those of
        # a graph that has saved it.
        known = self._seen
        self._seen = {id(b) for _, b in named}
        new = [b for _, b in named if id(b) not in known]
        aliased = {id(b) for b in new if _is_aliased(b, count_holders=not known)}
        self._aliased = (self._aliased & known & self._seen) | aliased

    def named(self) -> dict[str, Tensor]:
        """Return the buffers by name, without those that were deleted or set to None."""
        if self._changed:
            self._find()
        found = {}
        for name, path in self._paths.items():
            owner: nn.Module | None = self._module
            for part in path[:-1]:
                owner = None if owner is None else owner._modules.get(part)
            buffer = None if owner is None else owner._buffers.get(path[-1])
            if buffer is not None:
                found[name] = buffer
        return found

    def set_hook(self, hook: BufferHook, *, after_forward: bool) -> None:
        """See `DistributedDataParallel.register_buffer_hook`."""
        if not callable(hook):
            raise ArgumentTypeError(f"hook is {hook!r}: pass a callable hook(buffers, group)")
        self.hook, self.after_forward = hook, after_forward

    def sync(self, group: ProcessGroup, *, root: int = 0) -> None:
        """Make the buffers equal on all ranks. Graphs that have saved them keep their values."""
        named = self.named()
        with torch.inference_mode(False), torch.no_grad():
            held: dict[str, Tensor] = {}
            if self.hook is not None or group.rank() != root:  # the root's buffers are not written
                # not written in place: a graph may have saved the buffer or a view of it
                held = {
                    n: b
                    for n, b in named.items()
                    if (_holders(b) > 1 and id(b) not in self._aliased) or b.is_inference()
                }
                if any(map(_shares_memory, held.values())):
                    # a view that a module keeps must see what is written
                    kept = self._kept_storages({*map(id, held.values())})
                    held = {
                        n: b
                        for n, b in held.items()
                        if b.is_inference() or not _shares_memory(b) or _storage(b) not in kept
                    }
            written = {**named, **{n: _copy(b) for n, b in held.items()}} if held else named
            if self.hook is None:
                try:
                    broadcast_values(group, written.items(), group_src=root)
                except MismatchError as error:  # ranks in a backward give the group up, too
                    FaultDomain.of(group).give_up(error, error.__cause__)
            else:
                returned = self.hook(written, group)
                for future in returned if isinstance(returned, list | tuple) else (returned,):
                    if isinstance(future, torch._C.Future):
                        future.wait()
            for name, buffer in held.items():
                _take_values(buffer, written[name])

    def _kept_storages(self, ids: set[int]) -> set[int]:
        """Return the storages of tensors that modules keep, other than the tensors of these ids."""
        seen: set[int] = set()
        found = (t for m in self._module.modules() for t in in_attributes(vars(m), seen))
        return {_storage(t) for t in found if id(t) not in ids and torch._C._has_storage(t)}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _copy(buffer: Tensor) -> Tensor:
    """Return a copy that is expanded like the buffer, so that all ranks send the same bytes."""
    part = distinct(buffer)
    if part.shape == buffer.shape:
        return buffer.clone()
    return part.clone().expand(buffer.shape).detach()  # detached, so that it is not a view


def _take_values(buffer: Tensor, values: Tensor) -> None:
    """Give a buffer new values; other references to it keep the old ones."""
    if torch.equal(_bytes(distinct(buffer)), _bytes(distinct(values))):
        return
    if buffer.is_inference():
        with torch.inference_mode():
            distinct(buffer).copy_(distinct(values))  # an expanded one is not written as a whole
    else:
        # the Python object, which modules and users reference, gets the new memory; a graph saves
        # the C++ tensor, which keeps the old memory
        torch._C._swap_tensor_impl(buffer, values)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)


def _is_aliased(buffer: Tensor, *, count_holders: bool) -> bool:
    """Return True if other tensors share the buffer's memory: then it is written in place."""
    # a view that holds the only reference to its base, such as `torch.ones(1).expand(5)`, shares
    # nothing
    base_held = buffer._is_view() and _base_references(buffer) > _UNSHARED_BASE
    return _shares_memory(buffer) or base_held or (count_holders and _holders(buffer) > 1)


def _shares_memory(buffer: Tensor) -> bool:
    return buffer.layout == torch.strided and uses(buffer) > 1 + buffer._is_view()


def _base_references(view: Tensor) -> int:
    return sys.getrefcount(view._base)


with outside_contexts():
    _UNSHARED_BASE = _base_references(torch.empty(1, dtype=torch.float32).view(1))
    """References to a base that only its view holds."""


def _holders(tensor: Tensor) -> int:
    """Return the number of C++ references to a tensor, including that of its Python object."""
    count = holders(tensor)
    # a reference to a view of the tensor counts: a view of a view holds the base
    if tensor._is_view():
        # less those of the view itself and of the Python object
        count += holders(tensor._base) - 2  # type: ignore[arg-type]
    return count
