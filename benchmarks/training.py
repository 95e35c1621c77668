"""A training step of a case's network, under a wrapper that communicates its gradients, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from benchmarks.alternate import OURS
from gradwire.ddp import DistributedDataParallel

__all__ = ["BARE", "GLOO", "TORCH", "Case", "Training", "Wrapper", "peers", "wrappers"]

BARE = "no communication"
"""The same step of the same module without a wrapper, on all ranks at once."""

TORCH = "torch"
GLOO = "torch on Gloo"
"""Baseline of a user without gradwire's backend: torch's wrapper on a Gloo group."""

Wrapper = Callable[..., nn.Module]


def wrappers(backend: str) -> dict[str, Wrapper]:
    """The contenders on a default group of this backend; each rank calls, it may make a group."""
    contenders: dict[str, Wrapper] = {
        OURS: DistributedDataParallel,
        TORCH: TorchDistributedDataParallel,
    }
    if backend == "shm":
        gloo = dist.new_group(backend="gloo")
        contenders[GLOO] = partial(TorchDistributedDataParallel, process_group=gloo)
    return {**contenders, BARE: lambda module, **_: module}


def peers(backend: str) -> list[str]:
    """The contenders that ours is measured against."""
    return [TORCH, GLOO] if backend == "shm" else [TORCH]


def _as_it_is(module: nn.Module) -> None:
    """Register nothing."""


def _forward_and_backward(module: nn.Module, batch: Tensor) -> None:
    module(batch).square().mean().backward()


@dataclass(frozen=True)
class Case:
    """A network, the shape of each rank's batch, and the ratios to torch that are expected.

    A case that takes little time is given more rounds: `times` as many as were asked for.
    `options` are the wrappers' arguments; `memory` says whether peak memory is measured too.
    `draw` makes the batch of its shape.

    Attributes:
        prepare: Function of the wrapped module, such as one that registers a hook; not called for
            the module without a wrapper.
        backward: Function that runs what precedes the optimizer's step.
        exact: True if gradients are the same for all contenders, to rounding.
        starts: True if the times of construction and of the first step are measured, too.
        ranks: Number of ranks, where cases choose it.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Sequence[int]
    expected: str
    times: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = True
    draw: Callable[..., Tensor] = torch.randn
    prepare: Callable[[nn.Module], object] = _as_it_is
    backward: Callable[[nn.Module, Tensor], None] = _forward_and_backward
    exact: bool = True
    starts: bool = False
    ranks: int = 2


class Training:
    """A network with its optimizer and this rank's batch; all ranks begin with equal networks."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.module = case.model().to(device)
        self._case = case
        torch.manual_seed(1 + dist.get_rank())
        self._batch = case.draw(*case.batch).to(device)

    def wrap(self, wrapper: Wrapper) -> Training:
        """Puts the module under a wrapper, and makes an optimizer; returns self."""
        bare = self.module
        self.module = wrapper(self.module, **self._case.options)
        if self.module is not bare:
            self._case.prepare(self.module)
        # So small a rate leaves the values, and with them the time of a step, as they are.
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-6, foreach=True)
        return self

    def step(self) -> None:
        """Forward, backward and update; the gradients stay until the next step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._case.backward(self.module, self._batch)
        self._optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last step, dense, in the order of the parameters."""
        return [p.grad.to_dense() for p in self.module.parameters() if p.grad is not None]
