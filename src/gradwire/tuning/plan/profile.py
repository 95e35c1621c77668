"""Profile of a model's training step in this process: its times and its buckets."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire._containers import tensors_in
from gradwire.buckets import plan_buckets
from gradwire.errors import ArgumentError

CAPS = [1 << 20, 25 << 20]
"""Bucket capacities of `DistributedDataParallel` with a hook.

Without a hook, on the CPU, it uses the last one only.
"""
PARTS, PART_STEPS, PART_SECONDS = 3, 3, 0.1
"""Number of parts of a measurement, minimum number of steps in each, and their duration.

The result is the median of their means (see `candidates.PARTS`).
"""


@dataclass(frozen=True)
class Profile:
    """Profile of a model's step.

    Attributes:
        forward: Seconds of forward.
        ready: Seconds from the beginning of backward until each bucket is ready. The last is the
            end of backward.
        buckets: Parameters of each bucket, in launch order.
        update: Seconds of the optimizer's step and `zero_grad`, which frees the gradients' memory.
        plain: Profile without a hook, whose buckets may differ; None if it is the same.
    """

    forward: float
    ready: tuple[float, ...]
    buckets: tuple[tuple[Tensor, ...], ...]
    update: float = 0.0
    plain: Profile | None = None

    @property
    def numel(self) -> int:
        """Number of trained elements."""
        return sum(p.numel() for bucket in self.buckets for p in bucket)


def load_factory(name: str) -> tuple[nn.Module, tuple[Any, ...] | None, Optimizer | None]:
    """Call MODULE:FACTORY; return its module, and its inputs and optimizer or None.

    Raises:
        ArgumentError: There is no such factory, or it returns other objects.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ArgumentError(f"{name!r} has no colon: pass MODULE:FACTORY, such as models:build")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(factory):
        raise ArgumentError(f"{name!r} is a {type(factory).__name__}: pass a function")
    try:
        inspect.signature(factory).bind()
    except ValueError:
        pass  # a built-in without a signature: the call below shows whether it takes no arguments
    except TypeError as error:
        raise ArgumentError(f"{name!r} cannot be called without arguments: {error}") from error
    made = factory()
    parts = made if isinstance(made, tuple) and len(made) in (2, 3) else (made,)
    model, inputs, optimizer = (*parts, None, None)[:3]
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name!r} returned {type(model).__name__}: return a torch.nn.Module")
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if inputs is not None and not isinstance(inputs, list | tuple):
        kind = type(inputs).__name__
        raise ArgumentError(f"{name!r} returned inputs that are {kind}: return a tuple of them")
    _check_parameters(name, [p for p in model.parameters() if p.requires_grad])
    return model, None if inputs is None else tuple(inputs), optimizer


def _check_parameters(name: str, parameters: Sequence[Tensor]) -> None:
    if any(torch.nn.parameter.is_lazy(p) for p in parameters):
        raise ArgumentError(
            f"{name!r} returned a module with uninitialized parameters: run a forward first"
        )
    if not any(p.numel() for p in parameters):
        raise ArgumentError(
            f"{name!r} returned a module without trainable parameters: return a module to train"
        )
    if any(p.is_meta for p in parameters):
        raise ArgumentError(f"{name!r} returned a module on the meta device: create it on the CPU")


def profile(model: nn.Module, inputs: Sequence[Any], optimizer: Optimizer | None = None) -> Profile:
    """Measure some steps. The states of the model and the optimizer are restored afterwards."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = copy.deepcopy(model.state_dict())
    kept_too = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    _step(model, inputs, parameters, optimizer)
    parts = [_part(model, inputs, parameters, optimizer) for _ in range(PARTS)]
    model.load_state_dict(kept)
    if optimizer is not None and kept_too is not None:
        optimizer.load_state_dict(kept_too)
    forward = median(part.forward for part in parts)
    backward, update = median(p.backward for p in parts), median(p.update for p in parts)
    came = {id(p): median(part.came[id(p)] for part in parts) for p in parameters}

    def made(caps: Sequence[int]) -> Profile:
        buckets = _buckets(parameters, caps)
        each = [max(came[id(p)] for p in bucket) for bucket in buckets[:-1]]
        return Profile(forward, tuple(accumulate([*each, backward], max)), buckets, update)

    return replace(made(CAPS), plain=made(_plain_caps(parameters)))


def given(model: nn.Module, forward: float, backward: float) -> Profile:
    """Return a profile with the given times, and gradients that become ready at a constant rate."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def made(caps: Sequence[int]) -> Profile:
        buckets = _buckets(parameters, caps)
        sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
        passed = [sum(sizes[: i + 1]) / sum(sizes) for i in range(len(sizes))]
        return Profile(forward, tuple(backward * part for part in passed), buckets)

    return replace(made(CAPS), plain=made(_plain_caps(parameters)))


def _plain_caps(parameters: Sequence[Tensor]) -> list[int]:
    return CAPS[-1:] if all(p.device.type == "cpu" for p in parameters) else CAPS


def _buckets(parameters: Sequence[Tensor], caps: Sequence[int]) -> tuple[tuple[Tensor, ...], ...]:
    """Assign parameters to buckets in reverse order of registration, as in the first step."""
    order = list(reversed(parameters))
    plan = plan_buckets(
        [p.nbytes for p in order], [p.dtype for p in order], [p.device for p in order], caps
    )
    return tuple(tuple(order[i] for i in members) for members in plan.buckets)


@dataclass
class _Times:
    """Seconds of a step's parts, and of each gradient's arrival in backward."""

    forward: float
    backward: float
    update: float
    came: dict[int, float]


def _part(
    model: nn.Module,
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
    optimizer: Optimizer | None,
) -> _Times:
    """Return the mean times of some steps."""
    steps: list[_Times] = []
    start = perf_counter()
    while len(steps) < PART_STEPS or perf_counter() - start < PART_SECONDS:
        steps.append(_step(model, inputs, parameters, optimizer))
    return _Times(
        fmean(step.forward for step in steps),
        fmean(step.backward for step in steps),
        fmean(step.update for step in steps),
        {id(p): fmean(step.came.get(id(p), 0.0) for step in steps) for p in parameters},
    )


def _step(
    model: nn.Module,
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
    optimizer: Optimizer | None,
) -> _Times:
    came: dict[int, float] = {}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: came.update({id(p): perf_counter()}))
        for p in parameters
    ]
    start = perf_counter()
    output = model(*inputs)
    loss = sum(_real(t).float().sum() for t in _tensors(output))
    middle = perf_counter()
    loss.backward()  # type: ignore[union-attr]
    end = perf_counter()
    if optimizer is not None:
        _update(optimizer)
    model.zero_grad()
    updated = perf_counter()
    for handle in handles:
        handle.remove()
    at = {key: when - middle for key, when in came.items()}
    return _Times(middle - start, end - middle, updated - end, at)


def _update(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{type(optimizer).__name__} runs forward and backward several times per step: return "
            "(module, inputs) without it"
        )
    optimizer.step()


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors at which backward can begin."""
    found = [t for t in tensors_in(output) if t.requires_grad]
    if not found:
        raise ArgumentError(
            "the model's output has no tensor that requires grad: return one from forward"
        )
    return found
