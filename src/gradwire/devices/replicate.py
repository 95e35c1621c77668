"""Replicas of a module: its tree copied for each place, its tensors broadcast.

A replica's parameters are no leaves: gradients flow through them into the module's own.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire._torch import run_as_written
from gradwire.devices.copying import copies_coalesced
from gradwire.devices.functional import BUFFER_SIZE, broadcast_lists
from gradwire.devices.placement import Device, as_devices
from gradwire.errors import ArgumentError, NotSupportedError

__all__ = ["ReplicaCache", "check_home", "replicate"]

M = TypeVar("M", bound=Module)


class ReplicaCache:
    """The copies of a module's parameters from its last replication, for as long as they hold.

    A copy holds while its source is the same tensor with the same storage, address and layout,
    neither has been written since (by their version counters), no optimizer that has the source has
    made a step, and the devices are the same. Optimizers are watched because fused ones leave
    version counters as they are. So does writing in place through `.data` or around PyTorch: call
    `clear` after that. Buffers are never kept, because batch norm writes them in just this way.

    Copying or pickling a cache gives an empty one.
    """

    def __init__(self) -> None:
        self.clear()
        _watch_optimizers()
        with _caches_lock:
            _caches.add(self)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Forget the copies of these."""
        for tensor in tensors:
            self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all copies."""
        self._devices: tuple[torch.device, ...] = ()
        self._entries: dict[int, _Entry] = {}

    def __reduce__(self) -> tuple[type[ReplicaCache], tuple[()]]:
        return ReplicaCache, ()

    @run_as_written  # what is compared here must not become a constant of a compiled graph
    def copies(
        self, tensors: Sequence[Tensor], devices: tuple[torch.device, ...]
    ) -> list[list[Tensor]]:
        """For each place, every tensor; only what does not hold any more is copied."""
        if self._devices[: len(devices)] != devices:
            self.clear()
            self._devices = devices
        stale = [t for t in tensors if not self._holds(t)]
        if stale:
            # For fewer places than before, too: a call for all of them then copies all again.
            self._devices = devices
        # Copies made in inference mode would have no version counters.
        with torch.inference_mode(False), torch.no_grad():
            fresh = copies_coalesced(stale, devices, BUFFER_SIZE)
        made = {id(t): _Entry(t, [r[i] for r in fresh]) for i, t in enumerate(stale)}
        self._entries = {id(t): made.get(id(t)) or self._entries[id(t)] for t in tensors}
        entries = [self._entries[id(t)] for t in tensors]
        # Every call has aliases of its own, since autograd marks what it is given.
        return [[entry.alias(place) for entry in entries] for place in range(len(devices))]

    def _holds(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry.holds()


_caches: weakref.WeakSet[ReplicaCache] = weakref.WeakSet()
_caches_lock = threading.Lock()


@functools.cache
def _watch_optimizers() -> None:
    """Register one hook for the steps of all optimizers, once and for good.

    A hook for each cache would have to be removed with it, which may be in the middle of a step:
    then the step fails, because hooks must not go while they are called.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """What every optimizer calls after a step: its parameters' copies hold no more."""
    with _caches_lock:
        caches = list(_caches)
    for cache in caches:
        cache.forget(p for group in optimizer.param_groups for p in group["params"])


class _Entry:
    """A tensor's copies, and what told its state at the time of copying."""

    def __init__(self, source: Tensor, replicas: list[Tensor]) -> None:
        self.source = source
        self.replicas = replicas
        self.counted = [source, *(t for t in replicas if t is not source)]
        self.seen = self._state()
        # After `source.data = new`, whose version counter is the old one's, the next tensor may get
        # the freed memory. While something refers to this storage, no other gets its id; weakly, so
        # that the memory is free at once.
        self.storage = None if self.seen is None else StorageWeakRef(source.untyped_storage())

    def _state(self) -> tuple[object, ...] | None:
        """What differs once the copies do not hold; None for a source that does not tell."""
        x = self.source
        try:
            memory = x.untyped_storage()._cdata, x.data_ptr()
            layout = x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
            return (*memory, *layout, *[t._version for t in self.counted])
        except RuntimeError:  # inference tensors have no version counter, sparse ones no storage
            return None

    def holds(self) -> bool:
        return self.seen is not None and self.seen == self._state()

    def alias(self, place: int) -> Tensor:
        replica = self.replicas[place]
        return replica if replica is self.source else replica.detach()


def replicate(
    module: M, devices: Iterable[Device], detach: bool = False, *, cache: ReplicaCache | None = None
) -> list[M]:
    """Replicas of a module, one for each device.

    Args:
        module: Its parameters and buffers are on the first of `devices`.
        devices: The places, k of them; one device several times is several places.
        detach: Cut the replicas off from the module's gradients.
        cache: Where copies are kept for the next call; None copies every time.

    Returns:
        k modules of the same types. Their parameters are plain attributes, not leaves; the first
        replica's share storage with the module's, and its buffers are the module's own.

    Adjoint: `reduce_add_coalesced` of the replicas' gradients to the module's; zeros for a
    parameter that no replica has used, as PyTorch has it.

    Raises:
        ArgumentError: A parameter or buffer on another device, or not yet initialised.
        NotSupportedError: A TorchScript module, or one that torch.compile made.

    Example:
        >>> first, second = replicate(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> torch.equal(first.weight, second.weight)
        True
    """
    places = as_devices(devices)
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise NotSupportedError(
                f"module has a TorchScript module at {name!r}: replicate the eager one"
            )
        if "_orig_mod" in child._modules:
            raise NotSupportedError(
                f"module has one that torch.compile made at {name!r}: its replicas would write "
                "into it. Give the module that was compiled"
            )
    check_home(module, places[0])
    parameters, buffers = list(module.parameters()), list(module.buffers())
    held = ReplicaCache() if cache is None else cache
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        copied = zip(
            broadcast_lists(
                parameters, places, copier=lambda ts: held.copies(ts, places), zeros=True
            ),
            broadcast_lists(buffers, places),
            strict=True,
        )
    ids = [id(t) for t in (*parameters, *buffers)]
    replicas = []
    for tensors in copied:
        given = [t.detach() if detach and t.requires_grad else t for t in itertools.chain(*tensors)]
        replicas.append(_assembled(module, dict(zip(ids, given, strict=True))))
    return replicas


def check_home(module: Module, home: torch.device) -> None:
    """Refuse a module with a parameter or buffer elsewhere, or without a value."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} is not initialised: run the module once first")
        if tensor.device != home:
            raise ArgumentError(
                f"module must have its parameters and buffers on device {home}, the first of "
                f"devices, but {name} is on {tensor.device}: move the module there"
            )


def _assembled(module: M, tensors: dict[int, Tensor]) -> M:
    """A copy of the module's tree that holds the given tensors in place of its own."""
    replicas: dict[Module, Any] = {}
    for original in module.modules():
        replicas[original] = cast("Any", original)._replicate_for_data_parallel()
        # Modules that ask for their parameters while they run find them here.
        replicas[original]._former_parameters = {}
        # What Module.compile made calls the original, with its parameters.
        replicas[original]._compiled_call_impl = None
    for original, replica in replicas.items():
        for name, child in original._modules.items():
            if child is not None:
                setattr(replica, name, replicas[child])
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, tensors[id(parameter)])
                replica._former_parameters[name] = tensors[id(parameter)]
        for name, buffer in original._buffers.items():
            if buffer is not None:
                setattr(replica, name, tensors[id(buffer)])
    return cast("M", replicas[module])
