"""Methods of the reducer that frameworks call behave as those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.compat.ddp import DistributedDataParallel
from gradwire.testing import run_ranks

THEIRS = nn.parallel.DistributedDataParallel
STEPS = 3  # buckets are rebuilt after the first


class Heads(nn.Module):
    """A body and two heads, of which a forward may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: Tensor, heads: list[int]) -> Tensor:
        body = self.body(x)
        return torch.stack([self.heads[i](body).square().mean() for i in heads]).sum()


def gradients(net: nn.Module) -> list[list[float] | None]:
    found = [None if p.grad is None else p.grad.flatten().tolist() for p in net.parameters()]
    net.zero_grad()
    return found


class Runs(nn.Module):
    """As Lightning wraps a module: a training step, with its backwards, is a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Heads()

    def forward(self, training_step: Callable[[nn.Module], None]) -> None:
        training_step(self.net)


def as_lightning(wrapper: Any, options: dict[str, bool]) -> list[Any]:
    """Manual optimization: two forwards and backwards a step, each backward prepared for."""
    wrapped = wrapper(Runs(), **options)
    unused = "find_unused_parameters" in options
    torch.manual_seed(dist.get_rank())
    found: list[Any] = []

    def training_step(net: nn.Module) -> None:
        for part in range(2):
            loss = net(torch.randn(2, 4), [part] if unused else [0, 1])
            wrapped.require_forward_param_sync = True
            wrapped.reducer._rebuild_buckets()
            wrapped.reducer.prepare_for_backward([loss] if unused else [])
            loss.backward()
            if "static_graph" in options and not found:
                wrapped.reducer._delay_all_reduce()
            found.append(gradients(net))
        wrapped.require_backward_grad_sync = False

    for _ in range(STEPS):
        wrapped(training_step)
        wrapped.require_backward_grad_sync = True
    return found


def both(pattern: Any, *args: Any) -> list[Any]:
    return [pattern(wrapper, *args) for wrapper in (THEIRS, DistributedDataParallel)]


def check(of_ranks: list[list[Any]]) -> None:
    (theirs, ours), (_, of_rank_1) = of_ranks
    assert ours == of_rank_1, "the same on every rank"
    for a, b in zip(theirs, ours, strict=True):
        for p, q in zip(a, b, strict=True):
            assert q == (None if p is None else pytest.approx(p, rel=1e-5, abs=1e-7))


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
def test_every_backward_prepared_for_by_hand(option: str) -> None:
    options = {option: True} if option else {}
    check(run_ranks(partial(both, as_lightning, options), world_size=2, backend="gloo"))
