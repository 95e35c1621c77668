"""Observation of collectives, clipping, saving and `Join`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join
from torch.nn import utils
from torch.nn.utils import clip_grad

from gradwire._engine_errors import backend_timeout
from gradwire.check.observer import Observer, user_line
from gradwire.check.training_probes import Training

_REDUCING = ("all_reduce", "all_reduce_coalesced")
_GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_single")
_WAITING = (*_REDUCING, *_GATHERING, "barrier", "broadcast", "reduce_scatter_tensor", "all_to_all")
_WAIT_SECONDS = 0.5
"""Shortest wait in a collective that is written."""


def observe_process(observer: Observer, training: Training) -> None:
    """Write events for the program's own collectives, and for what it does to gradients."""
    for name in _WAITING:
        if hasattr(dist, name):
            observer.patch_everywhere((dist, c10d), name, _collective(observer, training, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        observer.patch_everywhere((utils, clip_grad), name, _clipping(observer, name))
    began: list[float] = []

    def saved(*_: Any, **__: Any) -> None:
        observer.emit("saved", since=began.pop(), until=time.monotonic())

    def saving(*_: Any, **__: Any) -> None:
        began[:] = [time.monotonic()]

    observer.around(torch, "save", before=saving, after=saved)
    observer.around(Join, "__enter__", before=lambda _: observer.emit("join"))


def _collective(observer: Observer, training: Training, name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            own = training.inside or training.in_backward or torch.compiler.is_compiling()
            if own or not observer.active or observer.busy:  # of a wrapper, or of gradwire
                return original(*args, **kwargs)
            observer.look(_before, observer, training, name, args, kwargs)
            since = time.monotonic()
            result = original(*args, **kwargs)
            until = time.monotonic()
            if until - since > _WAIT_SECONDS:
                observer.look(_waited, observer, name, since, until)
            if name in _GATHERING:
                observer.look(_gathered, training, args, kwargs)
            return result

        return called

    return make


def _before(observer: Observer, training: Training, name: str, args: Any, kwargs: Any) -> None:
    if name == "barrier":
        observer.emit("barrier")
    elif name in _REDUCING:
        tensors = args[0] if args else kwargs.get("tensor")
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if isinstance(tensor, Tensor) and (of := _whose_gradient(training, tensor)):
                observer.emit("reduced", parameter=of)


def _whose_gradient(training: Training, tensor: Tensor) -> str:
    """Return the place of the parameter whose gradient this is; "" if there is none."""
    if tensor.numel() == 0:
        return ""
    for optimizer, number in training.optimizers.items():
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for index, parameter in enumerate(parameters):
            grad = parameter.grad
            if grad is not None and grad.data_ptr() == tensor.data_ptr():
                return f"parameter {index} of optimizer {number}, shape {list(parameter.shape)}"
    return ""


def _waited(observer: Observer, name: str, since: float, until: float) -> None:
    group = dist.group.WORLD
    timeout = 0.0 if group is None else backend_timeout(group)
    observer.emit("waited", op=name, since=since, until=until, timeout=timeout)


def _gathered(training: Training, args: Any, kwargs: Any) -> None:
    """Keep the outputs of a gather whose input needs a gradient, until backward."""
    if len(args) < 2 or not isinstance(args[1], Tensor) or not args[1].requires_grad:
        return
    outputs = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    if not any(t.requires_grad for t in outputs):
        training.gathered.append((outputs, args[1], user_line()))


def _clipping(observer: Observer, name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            limit = args[0] if args else next(iter(kwargs.values()), None)
            largest = observer.look(_largest, name, given)
            result = original(given, *args, **kwargs)
            observer.look(_clipped, observer, name, result, limit, largest)
            return result

        return clip

    return make


def _largest(name: str, parameters: list[Tensor]) -> float:
    if name == "clip_grad_norm_":
        return 0.0
    return max((float(p.grad.abs().max()) for p in parameters if p.grad is not None), default=0.0)


def _clipped(observer: Observer, name: str, norm: Any, limit: Any, largest: Any) -> None:
    before = float(norm) if name == "clip_grad_norm_" else float(largest or 0.0)
    if isinstance(limit, (int, float, Tensor)) and before > float(limit):
        observer.emit("clipped", function=name, before=before, limit=float(limit))
