"""What makes up the state of training, and the values that buffers have when a step begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.ddp import DistributedDataParallel
from gradwire.errors import ArgumentTypeError

__all__ = ["State"]


class State:
    """What `Run.keep` was given.

    Attributes:
        kept: By name.
        modules: Those of it that are trained.
        models: Those of them that are wrapped in DistributedDataParallel.
        parameters: Of all modules.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self.models: list[DistributedDataParallel] = []
        self.parameters: list[Parameter] = []
        self._with_buffers: list[nn.Module] = []
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
            self.parameters += [p for p in value.parameters() if id(p) not in known]
            owners = (m for m in value.modules() if any(True for _ in m.buffers(recurse=False)))
            self._with_buffers += [m for m in owners if id(m) not in known]
        if isinstance(value, DistributedDataParallel):
            self.models.append(value)

    def buffers(self) -> list[Tensor]:
        """Those of all modules as they are now: a forward may put another tensor in one's place."""
        return [b for m in self._with_buffers for b in m.buffers(recurse=False) if b.numel()]

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
        for model in self.models:
            model.require_backward_grad_sync = sync
            model.require_forward_param_sync = sync
        if self._first_values[0] == version:
            self.put_buffers_back(version)
        else:
            self._first_values = (version, [b.detach().clone() for b in self.buffers()])

    @torch.no_grad()
    def put_buffers_back(self, version: int) -> None:
        """Undo what forward has changed of them, if that step has begun here."""
        if self._first_values[0] == version:
            for buffer, value in zip(self.buffers(), self._first_values[1], strict=True):
                buffer.copy_(value)

    def forget(self) -> None:
        """Another state was received: there is nothing to put back."""
        self._first_values = (-1, [])
