"""Parameters that LocalSGD exchanges: their anchors, and the properties that ranks compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire._digest import digest
from gradwire.buckets import plan_buckets
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.hooks import GradBucket

BUCKET_BYTES = 25 << 20
Named = Iterable[tuple[str, Tensor]]
Description = list[tuple[str, str]]


class TrackedParameters:
    """Named parameters, each with an anchor, its value on all ranks after the last exchange."""

    def __init__(self, source: nn.Module | Named) -> None:
        # a module's parameters are listed again at every exchange
        self._ask = _current_parameters(source)
        if not isinstance(source, nn.Module | Iterable) or isinstance(source, str | Tensor):
            raise ArgumentTypeError(
                f"named_parameters is a {type(source).__name__}: pass the module, or its "
                "named_parameters()"
            )
        named_parameters: Any = source if self._ask is None else self._ask()
        # including parameters that can never need a gradient
        self.everything = list(named_parameters)
        _check_named(self.everything)
        named = [(n, p) for n, p in self.everything if p.is_floating_point() or p.is_complex()]
        self.names, self.tensors = [n for n, _ in named], [p for _, p in named]
        self.anchors: list[Tensor] = []  # empty until `set_anchors`
        # the others are active, that is, exchanged, from the first step that may change them
        self.frozen = {i for i, p in enumerate(self.tensors) if not _may_change(p)}
        self.unshared: list[int] = []  # anchors that ranks have not compared yet
        if not self.active:
            raise ArgumentError("named_parameters has no trainable parameter: pass at least one")

    @property
    def active(self) -> list[int]:
        """Indices of the exchanged parameters."""
        # once each: one tensor with two names, or two of the same memory, would be mixed twice
        found: dict[object, int] = {}
        for i, p in enumerate(self.tensors):
            if i not in self.frozen:
                place = p.data_ptr() if p.layout == torch.strided else 0
                found.setdefault((place, p.shape, p.stride()) if place else id(p), i)
        return list(found.values())

    @torch.inference_mode(False)  # anchors are also written outside of inference mode
    @torch.no_grad()
    def set_anchors(self) -> None:
        """Set the anchors to the current values, which are the same on all ranks."""
        own = [p.detach() for p in self.tensors]
        # the anchor of a frozen parameter shares its memory
        self.anchors = [a if i in self.frozen else a.clone() for i, a in enumerate(own)]

    def activate_thawed(self) -> bool:
        """Activate parameters that a step may change from now on; return True if there are any."""
        # before that step, while the parameters still have the same values on all ranks
        thawed = [i for i in sorted(self.frozen) if _may_change(self.tensors[i])]
        self.activate(thawed)
        return bool(thawed)

    @torch.inference_mode(False)
    @torch.no_grad()
    def activate(self, indices: Iterable[int]) -> None:
        """Mark parameters as active; their current values become their anchors."""
        for index in indices:
            self.anchors[index].data = self.tensors[index].detach().clone()
            self.frozen.remove(index)
            self.unshared.append(index)

    def buckets(self, indices: Sequence[int]) -> list[list[int]]:
        """Assign parameters to buckets, each of which is sent as one message."""
        anchors = [self.anchors[i] for i in indices]
        plan = plan_buckets(
            [a.nbytes for a in anchors],
            [a.dtype for a in anchors],
            [a.device for a in anchors],
            [BUCKET_BYTES],
        )
        return [[indices[member] for member in members] for members in plan.buckets]

    def outer_gradients(self, indices: Sequence[int], number: int, *, is_last: bool) -> GradBucket:
        """Return anchors minus parameters, as a bucket of gradients."""
        parameters, anchors = ([of[i] for i in indices] for of in (self.tensors, self.anchors))
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        flat = torch.empty(numel, dtype=first.dtype, device=first.device)
        names = [self.names[i] for i in indices]
        # by the anchors' strides, which are the same on all ranks; the parameters' may have changed
        bucket = GradBucket(number, flat, parameters, is_last=is_last, names=names, like=anchors)
        for anchor, parameter, view in zip(anchors, parameters, bucket.gradients(), strict=True):
            torch.sub(anchor, parameter, out=view)
        return bucket

    def describe(self) -> Description:
        """Return names and properties of the active parameters that must be equal on all ranks."""
        active = ((self.names[i], self.tensors[i]) for i in self.active)
        # without strides, because gradients are sent in the order of the anchors' elements
        found = [(name, f"{p.dtype}, shape {tuple(p.shape)}") for name, p in active]
        for i in self.unshared:
            value = digest([self.anchors[i]]).hex()
            found.append((self.names[i], f"value before this rank's steps, {value}"))
        return found

    def problems(self, optimizer: Optimizer) -> Description:
        """Return names of trainable parameters that are not exchanged, with the reasons."""
        found = []
        own = dict(self.everything)
        for name, p in [] if self._ask is None else self._ask():
            if own.get(name) is not p:
                found.append((name, "replaced" if name in own else "added"))
        known = {id(p) for p in own.values()}
        for number, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    names = group.get("param_names")
                    name = names[i] if names else f"parameter {i} of param_groups[{number}]"
                    found.append((name, f"shape {tuple(p.shape)}, in the optimizer only"))
        return found

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer or the module has a parameter that is not exchanged."""
        for name, problem in self.problems(optimizer):
            raise ArgumentError(
                f"parameter {name!r} is not exchanged ({problem}): call synchronize() and pass "
                "all parameters of the optimizer to a new LocalSGD, or use a separate optimizer "
                "for parameters that are local to this rank"
            )

    def activate_saved(self, saved: Mapping[str, Tensor]) -> None:
        """Exchange the parameters whose anchors were saved."""
        ours = {self.names[i] for i in self.active}
        if not ours <= saved.keys() <= set(self.names):
            raise ArgumentError(
                f"the saved state is of other parameters, {sorted(saved.keys() ^ ours)} differ: "
                "load it with the parameters that it was saved with"
            )
        self.activate([i for i in sorted(self.frozen) if self.names[i] in saved])

    def load_anchors(self, saved: Mapping[str, Tensor]) -> None:
        """Copy saved anchors, which the next exchange compares between the ranks."""
        for i in self.active:
            self.anchors[i].copy_(saved[self.names[i]])
        self.unshared = list(self.active)


def _may_change(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _current_parameters(source: object) -> Callable[[], Iterator[tuple[str, Tensor]]] | None:
    """Return a function that lists a module's current parameters; None for other sources."""
    if isinstance(source, nn.Module):
        return source.named_parameters
    if (
        not isinstance(source, GeneratorType)
        or source.gi_code is not nn.Module.named_parameters.__code__
    ):
        return None
    # the module of a generator from `module.named_parameters()` is among its arguments
    given = inspect.getgeneratorlocals(source)
    if not isinstance(given.get("self"), nn.Module):  # the generator is exhausted
        return None
    arguments = given["prefix"], given["recurse"], given["remove_duplicate"]
    return partial(given["self"].named_parameters, *arguments)


def _check_named(named: list[tuple[str, Tensor]]) -> None:
    names = set()
    for entry in named:
        match entry:
            case (name, Tensor()) if name not in names:
                names.add(name)
            case (name, Tensor()):
                raise ArgumentError(
                    f"named_parameters has two parameters {name!r}: use "
                    "module.named_parameters(prefix=...) to make the names of several modules "
                    "unique"
                )
            case _:
                raise ArgumentTypeError(
                    f"named_parameters has an entry of type {type(entry).__name__}: pass pairs of "
                    "a name and a parameter, such as module.named_parameters()"
                )
