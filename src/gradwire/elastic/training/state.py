"""What makes up the state of training, and the values that buffers have when a step begins."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

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


class State:
    """What `Run.keep` was given.

    Attributes:
        kept: By name.
        modules: Those of it that are trained.
        models: Those of them that are wrapped in DistributedDataParallel.
        parameters: Of all modules.
        line: Name of this line of training, which its checkpoints carry: whoever receives or loads
            a state continues its line.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self.models: list[DistributedDataParallel] = []
        self.parameters: list[Parameter] = []
        self.line = secrets.token_hex(8)
        self._names: list[str] = []
        self._versions: list[int] = []
        self._with_buffers: list[nn.Module] = []
        self._warned_of: set[type] = set()
        self._first_values: tuple[int, list[Tensor]] = (-1, [])

    def keep(self, name: str, value: Any) -> None:
        """Add to it.

        Raises:
            ArgumentTypeError: It has no `state_dict` or `load_state_dict`.
        """
        if not all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
            raise ArgumentTypeError(
                f"{name} is {type(value).__name__}: pass what has state_dict and load_state_dict"
            )
        self.kept[name] = value
        if isinstance(value, nn.Module):
            self.modules.append(value)
            known = {*map(id, self.parameters), *map(id, self._with_buffers)}
            new = [(n, p) for n, p in value.named_parameters() if id(p) not in known]
            self.parameters += [p for _, p in new]
            self._names += [f"{name}.{n}" for n, _ in new]
            owners = (m for m in value.modules() if any(True for _ in m.buffers(recurse=False)))
            self._with_buffers += [m for m in owners if id(m) not in known]
        if isinstance(value, DistributedDataParallel):
            self.models.append(value)

    def buffers(self) -> list[Tensor]:
        """Those of all modules as they are now: a forward may put another tensor in one's place."""
        return [b for m in self._with_buffers for b in m.buffers(recurse=False) if b.numel()]

    def beside(self) -> list[Any]:
        """What a new member has to know beside what `state_dict` gives.

        Whether each parameter is trained, the buffers that are not persistent, and the line.
        """
        return [[p.requires_grad for p in self.parameters], self._not_persistent(), self.line]

    @torch.no_grad()
    def put_beside(self, received: Sequence[Any]) -> None:
        """Take what `beside` gave on another member.

        Raises:
            MismatchError: Its models are others.
        """
        trained, values, line = received
        own = self._not_persistent()
        kinds = [[(tuple(b.shape), b.dtype) for b in buffers] for buffers in (own, values)]
        if len(trained) != len(self.parameters) or kinds[0] != kinds[1]:
            raise MismatchError(
                f"the models have {len(self.parameters)} parameters and buffers that are not "
                f"persistent of {kinds[0]} here, {len(trained)} and {kinds[1]} on the "
                "member that has the state: build the same on all members"
            )
        self.line = line
        for parameter, is_trained in zip(self.parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        for buffer, value in zip(own, values, strict=True):
            buffer.copy_(value)

    def _not_persistent(self) -> list[Tensor]:
        return [
            buffer
            for module in self._with_buffers
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]

    @property
    def first_buffers(self) -> list[Tensor]:
        """The values that they had when the step began."""
        return self._first_values[1]

    def warn_of_unkept(self, steppers: Iterable[object]) -> None:
        """Warn, once for each type, of what is stepped and has a state that is not kept."""
        for stepper in steppers:
            kind = type(stepper)
            if kind in self._warned_of or not hasattr(kind, "state_dict") or self._has(stepper):
                continue
            self._warned_of.add(kind)
            warnings.warn(
                f"step.commit got a {kind.__name__} that run.keep did not: a member that joins "
                f"later would begin with a new one. Call run.keep({kind.__name__.lower()}=...), or "
                "keep what has it as an attribute, before run.steps",
                NotKeptWarning,
                stacklevel=4,  # the loop
            )

    def _has(self, stepper: object) -> bool:
        """Whether it is kept, or something is that has it."""
        kept = self.kept.values()
        return any(stepper is value for value in kept) or any(
            stepper is part for value in kept for part in _parts(value)
        )

    def set_group(self, group: ProcessGroup) -> None:
        """Have the models average in an epoch's group."""
        for model in self.models:
            model.process_group = group

    def begin_step(self, version: int, *, sync: bool) -> None:
        """Clear gradients; put buffers back to their values at the step's beginning.

        Args:
            version: The step's number.
            sync: Whether DistributedDataParallel averages gradients and buffers itself.
        """
        for parameter in self.parameters:
            parameter.grad = None
        self._versions = self._written()
        for model in self.models:
            model.require_backward_grad_sync = sync
            model.require_forward_param_sync = sync
        if self._first_values[0] == version:
            self.put_buffers_back(version)
        else:
            self._first_values = (version, [b.detach().clone() for b in self.buffers()])

    def _written(self) -> list[int]:
        """How often each parameter has been written to."""
        return [0 if p.is_inference() else p._version for p in self.parameters]

    def check_unwritten(self, step: int) -> None:
        """Raise if a parameter was written to since the step began.

        Each member runs other shards: their parameters would come apart.

        Raises:
            NotSupportedError: One was.
        """
        if (now := self._written()) == self._versions:
            return
        pairs = zip(self._names, now, self._versions, strict=True)
        name = next(name for name, new, old in pairs if new != old)
        raise NotSupportedError(
            f"parameter {name!r} was written to within step {step}, as the forward of "
            "Embedding(max_norm=) does: members run other shards, and would get other values. "
            "Write to parameters once a step, in the step() of an object that step.commit gets "
            "after the optimizer"
        )

    def take_gradients(self) -> list[Tensor | None]:
        """Those of all parameters, which have none from now on."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def give_gradients(self, taken: Sequence[Tensor | None]) -> None:
        """Put back what `take_gradients` gave; nothing if that is empty."""
        for parameter, gradient in zip(self.parameters, taken, strict=False):
            parameter.grad = gradient

    @torch.no_grad()
    def put_buffers_back(self, version: int) -> None:
        """Undo what forward has changed of them, if that step has begun here."""
        if self._first_values[0] == version:
            for buffer, value in zip(self.buffers(), self._first_values[1], strict=True):
                buffer.copy_(value)

    def forget(self) -> None:
        """Another state was received: there is nothing to put back."""
        self._first_values = (-1, [])


def _parts(value: object) -> Iterator[object]:
    """What an object has as attributes, and in lists and dicts that are attributes."""
    for name, part in getattr(value, "__dict__", {}).items():
        if name == "optimizer" and isinstance(value, LRScheduler):
            continue  # which it steps, but whose state it leaves out
        yield part
        if isinstance(part, list | tuple | dict):
            yield from part.values() if isinstance(part, dict) else part


def check_reduced(steppers: Iterable[object], reduced: Container[int]) -> None:
    """Raise if an optimizer has a gradient that is not added up over the members.

    Each of them would step by its own, and they would come apart without a word.

    Args:
        steppers: What is stepped.
        reduced: The ids of the parameters whose gradients are added up.

    Raises:
        ReductionError: A parameter with a gradient is not among them.
    """
    for stepper in steppers:
        for number, group in enumerate(getattr(stepper, "param_groups", ())):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in reduced:
                    raise ReductionError(
                        f"{type(stepper).__name__} steps a parameter of shape "
                        f"{tuple(parameter.shape)}, {place} of its group {number}, whose gradient "
                        "is this member's alone: before run.steps, give run.keep a model that has "
                        "it (with reproducible=False in DistributedDataParallel), and freeze and "
                        "thaw parameters between two steps"
                    )
