"""Arguments of DistributedDataParallel, their checks, and the module's parameters later.

Parameters that are added, replaced or thawed after wrapping would be trained on this rank only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from numbers import Real
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradwire._groups import check_group, default_group
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of a `Reducer`, as in `DistributedDataParallel`."""

    # size limits in bytes of the first bucket, the second, …; the last one repeats
    caps: Sequence[int] | None = None
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    # nothing is sent for unused buckets
    skip_unused: bool = False
    # names of the parameters whose gradients are sparse
    sparse: Collection[str] = ()
    # names of the parameters that are sent together, after all others
    delayed: Collection[str] = ()
    lazy: bool = False
    # `Reducer.finalize` ends a backward
    manual_finalization: bool = False
    # name of the wrapped module, for messages
    module: str = "(a reducer)"

    @property
    def rebuilds(self) -> bool:
        """True if buckets are reassigned after the first backward, in rank 0's order."""
        return self.static_graph or not self.find_unused_parameters  # the same parameters each time


class WeakHook:
    """Callable that calls a method, with leading arguments, while its object is alive."""

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any) -> Any:
        """Return the method's result; None if its object was collected."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*self._first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # copies and pickles do nothing: a copied module must not call the original's hooks
        return WeakHook, ()


def remove_hooks(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def remove_hooks_with(owner: object, handles: Sequence[Any]) -> weakref.finalize[Any, Any]:
    """Remove hooks once their owner is collected, or when the returned finalizer is called."""
    # the hooks hold no reference to the owner; at exit, modules needed for it may be gone
    finalizer = weakref.finalize(owner, remove_hooks, handles)
    finalizer.atexit = False
    return finalizer


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a subclass's values, or the tensor itself."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    return [inner for value in held if isinstance(value, Tensor) for inner in inner_tensors(value)]


def check_not_expanded(tensor: Tensor, name: str) -> None:
    """Raise ArgumentError if several of a tensor's elements share one element in memory."""
    if tensor.layout != torch.strided:
        return
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{name}, of shape {tuple(tensor.shape)}, is expanded: several of its elements share "
            "one element in memory, and cannot be written separately; clone() it"
        )


def check_module(module: object, ignored: set[str]) -> list[tuple[str, Parameter]]:
    """Return the module's parameters by name, or raise if they cannot be reduced."""
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    if not any(p.requires_grad for _, p in named):
        raise ArgumentError(
            f"module {type(module).__name__} has no parameter that requires a gradient: use it "
            "without the wrapper"
        )
    for name, p in named:
        if isinstance(p, UninitializedParameter):
            raise ArgumentError(
                f"parameter {name} has no shape yet: run a forward of the lazy module first"
            )
        if p.is_meta:
            raise ArgumentError(
                f"parameter {name} is on the meta device, and has no values: call the module's "
                "to_empty and initialize it first"
            )
        check_not_expanded(p, f"parameter {name}")
        if type(p) is not Parameter and p.requires_grad:
            # the gradients of a subclass must be copied to and from a plain tensor
            kind, held = type(p).__name__, len(inner_tensors(p))
            problem = ""
            if hasattr(p, "to_local"):
                problem = ", of which each rank holds a part: wrap a module of its to_local()"
            elif held > 1:
                problem = f" that holds {held} tensors, but gradients are sent as one: use others"
            if problem:
                raise NotSupportedError(
                    f"parameter {name} is a {kind}{problem}, or set requires_grad=False on it"
                )
        if p.grad_dtype not in (p.dtype, None):
            raise NotSupportedError(
                f"parameter {name} is of {p.dtype}, and its grad_dtype {p.grad_dtype}: gradients "
                "are reduced in the parameter's dtype. Leave grad_dtype unset"
            )
    return named


def check_interval(every: object) -> int | None:
    """Return `check_replicas` if it is a number of steps or None."""
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int):
        raise ArgumentTypeError(f"check_replicas is {every!r}: pass a number of steps, or None")
    if every < 0:
        raise ArgumentError(f"check_replicas is {every}: pass a number of steps, 0 for never")
    return every


def resolve_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> list[int] | None:
    """Return bucket limits in bytes; None, for the reducer's defaults, if none are given."""
    if cap_mb is not None and cap_mb_list is not None:
        raise ArgumentError(
            f"bucket_cap_mb={cap_mb} and bucket_cap_mb_list={list(cap_mb_list)} are both given: "
            "pass one"
        )
    if cap_mb is None and cap_mb_list is None:
        return None
    name = "bucket_cap_mb_list" if cap_mb is None else "bucket_cap_mb"
    given: Any = cap_mb_list if cap_mb is None else [cap_mb]
    if not isinstance(given, Sequence) or not all(isinstance(mb, Real) for mb in given):
        raise ArgumentTypeError(f"{name} is {given!r}: pass numbers of MiB")
    if not given or not all(0 <= mb < math.inf for mb in given):
        raise ArgumentError(f"{name} is {given}: pass MiB, 0 for one bucket per parameter")
    return [max(1, int(mb * (1 << 20))) for mb in given]


def resolve_device(
    named: Sequence[tuple[str, Parameter]],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """Return the device that inputs are moved to, or None."""
    if isinstance(device_ids, int | str | torch.device):
        raise ArgumentTypeError(f"device_ids is {device_ids!r}: pass a list of one device, or None")
    given = [*(device_ids or ()), *([] if output_device is None else [output_device])]
    if not given:
        return None
    devices = {p.device for _, p in named}
    one = next(iter(devices))
    if len(devices) > 1 or one.type == "cpu":
        raise ArgumentError(
            f"device_ids={device_ids}, output_device={output_device}: the module's parameters are "
            f"on {sorted(map(str, devices))}; pass these arguments for a module on one accelerator"
        )
    wanted = {torch.device(one.type, d) if isinstance(d, int) else torch.device(d) for d in given}
    if wanted != {one} or len(device_ids or ()) > 1:
        raise ArgumentError(
            f"device_ids={device_ids}, output_device={output_device}: the module is on {one}; "
            "pass that device"
        )
    return one


def resolve_group(group: ProcessGroup | None, mesh: Any) -> ProcessGroup:
    """Return the process group: the given one, that of a mesh, or the default group."""
    if mesh is not None:
        if group is not None:
            raise ArgumentError("process_group and device_mesh are both given: pass one")
        if not isinstance(mesh, DeviceMesh):
            raise ArgumentTypeError(
                f"device_mesh is a {type(mesh).__name__}: pass a torch.distributed.DeviceMesh"
            )
        if mesh.ndim != 1:
            raise ArgumentError(
                f"device_mesh has {mesh.ndim} dimensions: pass one of them, for instance "
                "device_mesh['dp']"
            )
        group = mesh.get_group(mesh_dim=0)
    name = "process_group"
    return check_group(default_group(name) if group is None else group, name)


def resolve_delayed(
    named: Sequence[tuple[str, Parameter]],
    delayed: Sequence[tuple[str, Parameter]] | None,
    trigger: Parameter | None,
) -> list[str]:
    """Return the names of the parameters that are sent after all others, in a separate bucket."""
    if (delayed is None) != (trigger is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: pass "
            "both, or neither"
        )
    names = {id(p): n for n, p in named}
    unknown = [n for n, p in delayed or () if id(p) not in names]
    if unknown or (trigger is not None and id(trigger) not in names):
        raise ArgumentError(
            f"delay_all_reduce_named_params has {unknown}, which are no parameters of the module"
            if unknown
            else "param_to_hook_all_reduce is no parameter of the module"
        )
    return [names[id(p)] for _, p in delayed or ()]


def sparse_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters with sparse gradients: those of sparse embeddings."""
    ids = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
    return {name for name, p in module.named_parameters() if id(p) in ids}


_DEPTH, _MOST = 3, 4096
"""Limits on nested objects of other classes: levels and values searched. An object may have a
tokenizer with all of its words."""


def in_attributes(attributes: dict[str, Any], seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an object, such as a distribution, given its `__dict__`."""
    # nearest first; no code of the objects runs; they may form cycles
    held: list[Any] = [attributes]
    count = 0
    for _ in range(_DEPTH):
        level: list[Any] = []
        while held:
            inside: list[Any] = []
            for container in held:
                if id(container) not in seen:
                    seen.add(id(container))
                    room = _MOST - count - len(inside)
                    inside += islice(_items(container), min(room, _MOST // 8))
            count += len(inside)
            held = []
            for v in inside:
                if isinstance(v, Tensor):
                    yield v
                else:
                    (held if isinstance(v, dict | list | tuple) else level).append(v)
        held = [object.__getattribute__(v, "__dict__") for v in level if may_hold(v)]


def may_hold(value: Any) -> bool:
    """Return True if an object has attributes, and is neither a module nor a class."""
    if isinstance(value, nn.Module | type | ModuleType):
        return False
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except Exception:  # proxies of other objects may compute __dict__, or have none
        return False


def _items(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    """Return a container's values without calling methods of its subclass."""
    if isinstance(container, dict):
        return dict.values(container)
    return list.__iter__(container) if isinstance(container, list) else tuple.__iter__(container)


_WATCHERS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def watch_registrations(watcher: Any) -> None:
    """Let a watcher know of the parameters, buffers and children that any module is given."""
    _register_hooks()
    _WATCHERS[id(watcher)] = watcher


@cache
def _register_hooks() -> None:
    # They stay: PyTorch loops over them while a module is built. A watcher may be collected then,
    # and the removal of its hook would make the loop raise.
    def on_registration(module: nn.Module, name: str, value: Any) -> None:
        for reference in _WATCHERS.valuerefs():
            if (watcher := reference()) is not None:
                watcher.on_registration(module, name, value)

    for kind in ("parameter", "buffer", "module"):
        getattr(torch_module, f"register_module_{kind}_registration_hook")(on_registration)


class ParameterCheck:
    """Compares a module's parameters with those at construction, after new registrations."""

    def __init__(
        self, module: nn.Module, named: Sequence[tuple[str, Parameter]], ignored: Collection[str]
    ) -> None:
        self._module, self._ignored = module, ignored
        # by identity: pruning, parametrizations and a new Sequential rename parameters
        self._known = {id(p): p for p in module.parameters()}
        self._frozen = [(n, p) for n, p in named if not p.requires_grad]
        self._modules = {id(child) for child in module.modules()}
        # `torch.func.functional_call` registers nothing: tensors that it substitutes for parameters
        # in one call are ignored
        self._registered: WeakValueDictionary[int, Parameter] = WeakValueDictionary()
        watch_registrations(self)

    def on_registration(self, module: nn.Module, name: str, value: Any) -> None:
        """Record a parameter, or a child with its parameters, that the module has from now on."""
        if id(module) not in self._modules:
            return
        if isinstance(value, Parameter):
            self._registered[id(value)] = value
        elif isinstance(value, nn.Module):
            self._modules.update(id(inner) for inner in value.modules())
            self._registered.update((id(p), p) for p in value.parameters())

    def check(self) -> None:
        """Raise ArgumentError if there are parameters that would not be reduced."""
        thawed = [n for n, p in self._frozen if p.requires_grad]
        new: list[str] = []
        if self._registered:
            for known in self._known:  # registered again
                self._registered.pop(known, None)
            named = self._module.named_parameters()
            new = [n for n, p in named if n not in self._ignored and id(p) in self._registered]
        if new or thawed:
            what = "added or replaced" if new else "frozen when the module was wrapped, and are not"
            raise ArgumentError(
                f"parameters {new or thawed} were {what}: their gradients would not be reduced. "
                "Call refit() on every rank, and add them to the optimizer"
            )
