"""The gradient of every collective, by finite differences across ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import collectives as c
from gradwire.testing import gradcheck

__all__ = ["OPS", "wrong_gradients"]

_SHAPE = (2, 1)  # a rank's; each element is several calls


def _pairs() -> list[tuple[int, int]]:
    world = dist.get_world_size()
    return [(rank, (rank + 1) % world) for rank in range(world)]


def _around(x: Tensor) -> Tensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    return c.send_recv(x, (rank + 1) % world, (rank - 1) % world)


def _repeated(x: Tensor) -> Tensor:
    """As many rows for each rank."""
    return x.repeat(dist.get_world_size(), 1)


OPS: Mapping[str, Callable[[Tensor], Any]] = {
    "all_gather": c.all_gather,
    "all_gather_coalesced": lambda x: c.all_gather_coalesced([x, 2 * x]),
    "all_gather_list": c.all_gather_list,
    "all_reduce": c.all_reduce,
    "all_reduce avg": lambda x: c.all_reduce(x, "avg"),
    "all_reduce max": lambda x: c.all_reduce(x, "max"),
    "all_reduce product": lambda x: c.all_reduce(x, "product"),
    "all_reduce_coalesced": lambda x: c.all_reduce_coalesced([x, 2 * x]),
    "all_to_all": lambda x: c.all_to_all(_repeated(x)),
    "broadcast": lambda x: c.broadcast(x, 0),
    "broadcast_coalesced": lambda x: c.broadcast_coalesced([x, 2 * x], 0),
    "exscan": c.exscan,
    "gather": lambda x: c.gather(x, 0),
    "halo_exchange": lambda x: c.halo_exchange(x, 1),
    "logsumexp": c.logsumexp,
    "mean": c.mean,
    "norm": c.norm,
    "ppermute": lambda x: c.ppermute(x, _pairs()),
    "reduce": lambda x: c.reduce(x, 0),
    "reduce_coalesced": lambda x: c.reduce_coalesced([x, 2 * x], 0),
    "reduce_scatter": lambda x: c.reduce_scatter(_repeated(x)),
    "reduce_scatter_coalesced": lambda x: c.reduce_scatter_coalesced([_repeated(x)]),
    "scan": c.scan,
    "scatter": lambda x: c.scatter(_repeated(x), 0),
    "send_recv": _around,
    "shift": c.shift,
    "softmax": c.softmax,
    "var": c.var,
}


def wrong_gradients() -> dict[str, str]:
    """The ops whose gradient is wrong in the default group, with why. All ranks call it."""
    wrong = {}
    for name, op in OPS.items():
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(_SHAPE, dtype=torch.float64, generator=generator).requires_grad_()
        try:
            gradcheck(op, (x,))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return wrong
