"""Kept objects of training, and the values of buffers at the beginning of a step."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim.lr_scheduler import LRScheduler

from gradwire.ddp import DistributedDataParallel
from gradwire.errors import (
    ArgumentTypeError,
    MismatchError,
    NotKeptWarning,
    NotSupportedError,
    ReductionError,
)


class Stepper(Protocol):
    """Object that is stepped once when a step is committed: an optimizer or a schedule."""

    def step(self) -> Any:
        """Advance by one step."""
        ...


class Kept:
    """Objects that `Run.keep` was given."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self.models: list[DistributedDataParallel] = []
        self.parameters: list[Parameter] = []
        # of this training and its checkpoints; a member that receives or loads a state continues it
        self.lineage = secrets.token_hex(8)
        self._names: list[str] = []
        self._versions: list[int] = []
        self._with_buffers: list[nn.Module] = []
        self._warned_of: set[type] = set()
        self.first_buffers: list[Tensor] = []  # values at the beginning of the step
        self._first_step = -1

    def keep(self, name: str, value: Any) -> None:
        """Add an object."""
        if not all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
            kind = type(value).__name__
            raise ArgumentTypeError(
                f"{name} is {kind}: pass an object with state_dict and load_state_dict"
            )
        self.objects[name] = value
        if isinstance(value, nn.Module):
            self.modules.append(value)
            known = {*map(id, self.parameters), *map(id, self._with_buffers)}
            new = [(n, p) for n, p in value.named_parameters() if id(p) not in known]
            self.parameters += [p for _, p in new]
            self._names += [f"{name}.{n}" for n, _ in new]
            with_buffers = (
                m for m in value.modules() if any(True for _ in m.buffers(recurse=False))
            )
            self._with_buffers += [m for m in with_buffers if id(m) not in known]
        if isinstance(value, DistributedDataParallel):
            self.models.append(value)

    def buffers(self) -> list[Tensor]:
        """Return the current buffers of all modules; forward may have replaced their tensors."""
        return [b for m in self._with_buffers for b in m.buffers(recurse=False) if b.numel()]

    def beside(self) -> list[Any]:
        """Return the state for a new member that `state_dict` does not contain."""
        return [[p.requires_grad for p in self.parameters], self._not_persistent(), self.lineage]

    @torch.no_grad()
    def put_beside(self, received: Sequence[Any]) -> None:
        """Load the values that `beside` returned on another member."""
        trained, values, lineage = received
        own = self._not_persistent()
        kinds = [[(tuple(b.shape), b.dtype) for b in buffers] for buffers in (own, values)]
        if len(trained) != len(self.parameters) or kinds[0] != kinds[1]:
            raise MismatchError(
                f"the models have {len(self.parameters)} parameters and non-persistent buffers of "
                f"{kinds[0]} here, but {len(trained)} and {kinds[1]} on the member that has the "
                "state: build the same models on all members"
            )
        self.lineage = lineage
        for parameter, is_trained in zip(self.parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        for buffer, value in zip(own, values, strict=True):
            buffer.copy_(value)
        self._first_step = -1  # the values of buffers at its beginning are of another state

    def _not_persistent(self) -> list[Tensor]:
        return [
            buffer
            for module in self._with_buffers
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]

    def warn_of_unkept(self, steppers: Iterable[object]) -> None:
        """Warn, once per type, of stepped objects with a state that are not kept."""
        for stepper in steppers:
            kind, kept = type(stepper), self.objects.values()
            if kind in self._warned_of or not hasattr(kind, "state_dict"):
                continue
            if any(stepper is part for value in kept for part in (value, *_parts(value))):
                continue
            self._warned_of.add(kind)
            warnings.warn(
                f"step.commit got a {kind.__name__} that was not passed to run.keep: a member that "
                "joins later would begin with a new one. Before run.steps, call "
                f"run.keep({kind.__name__.lower()}=...), or keep an object with it as an attribute",
                NotKeptWarning,
                stacklevel=4,  # the loop
            )

    def set_group(self, group: ProcessGroup) -> None:
        """Set the process group of the models."""
        for model in self.models:
            model.process_group = group

    def begin_step(self, step: int, *, sync: bool) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        self.swap_gradients(repeat(None))
        self.note_versions()
        for model in self.models:
            # set if DistributedDataParallel averages gradients and buffers itself
            model.require_backward_grad_sync = sync
            model.require_forward_param_sync = sync
        if self._first_step == step:
            self.put_buffers_back(step)
        else:
            self._first_step = step
            self.first_buffers = [b.detach().clone() for b in self.buffers()]

    def note_versions(self) -> None:
        """Note that the parameters have their values at the beginning of the step."""
        self._versions = self._written()

    def _written(self) -> list[int]:
        """Return the version counters of the parameters."""
        return [0 if p.is_inference() else p._version for p in self.parameters]

    def check_unwritten(self, step: int) -> None:
        """Raise if a parameter was written to since the step began."""
        if (now := self._written()) == self._versions:
            return
        pairs = zip(self._names, now, self._versions, strict=True)
        name = next(name for name, new, old in pairs if new != old)
        raise NotSupportedError(
            f"parameter {name!r} was written to within step {step}, as by the forward of "
            "Embedding(max_norm=): members run different shards, so that its values would "
            "diverge. Write to parameters once per step, in the step() of an object that is "
            "passed to step.commit after the optimizer"
        )

    def swap_gradients(self, others: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Set the gradients of all parameters, and return the previous ones."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, others, strict=False):
            parameter.grad = gradient
        return taken

    @torch.no_grad()
    def put_buffers_back(self, step: int) -> None:
        """Restore the buffers that forward has changed, if that step has begun here."""
        if self._first_step == step:
            for buffer, value in zip(self.buffers(), self.first_buffers, strict=True):
                buffer.copy_(value)


def _parts(value: object) -> Iterator[object]:
    """Yield the attributes of an object, and the entries of lists and dicts among them."""
    for name, part in getattr(value, "__dict__", {}).items():
        if name == "optimizer" and isinstance(value, LRScheduler):
            continue  # a schedule steps its optimizer, but does not save its state
        yield part
        if isinstance(part, list | tuple | dict):
            yield from part.values() if isinstance(part, dict) else part


def check_reduced(steppers: Iterable[object], reduced: Container[int]) -> None:
    """Raise if an optimizer would step a parameter whose gradient was not reduced."""
    # otherwise the parameters of the members would silently diverge
    for stepper in steppers:
        for number, group in enumerate(getattr(stepper, "param_groups", ())):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in reduced:
                    raise ReductionError(
                        f"{type(stepper).__name__} steps a parameter of shape "
                        f"{tuple(parameter.shape)}, {index} of its group {number}, whose gradient "
                        "was not reduced over the members: before run.steps, pass run.keep a model "
                        "that has it (with reproducible=False in DistributedDataParallel); freeze "
                        "and unfreeze parameters between two steps"
                    )
