"""Cases of `ddp --all`: options, hooks and programs that people switch on, and many ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from benchmarks import models
from benchmarks.training import Case
from gradwire.ddp import DistributedDataParallel

__all__ = ["CASES", "LARGE_BUCKET_MB", "power_sgd"]

AT_MOST_ONE = "step at most 1"
LARGE_BUCKET_MB = 1000
"""Size of a bucket that holds all gradients. PyTorch's PowerSGD hangs on Gloo with several buckets:
its hooks send in no fixed order."""


# -- hooks ---------------------------------------------------------------------------------


def _register(ours: Any, theirs: Any, state: Callable[[], Any], module: nn.Module) -> None:
    """Register a hook: gradwire's and the one of PyTorch that does the same, or one for both."""
    mine = isinstance(module, DistributedDataParallel)
    register: Any = module.register_comm_hook
    register(state(), ours if mine else theirs)


def _nothing() -> None:
    """Return None, the state of most hooks."""


def power_sgd() -> power.PowerSGDState:
    """Return the state of PyTorch's PowerSGD: two steps without it, then rank 4."""
    return power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


def _hook(
    ours: Any, theirs: Any = None, state: Callable[[], Any] = _nothing
) -> Callable[[nn.Module], None]:
    return partial(_register, ours, theirs or ours, state)


# -- programs ------------------------------------------------------------------------------


def _accumulate(module: nn.Module, batch: Tensor) -> None:
    local: Any = getattr(module, "no_sync", nullcontext)
    for part in batch.chunk(4)[:-1]:
        with local():
            module(part).square().mean().backward()
    module(batch.chunk(4)[-1]).square().mean().backward()


def _forward_twice(module: nn.Module, batch: Tensor) -> None:
    first, second = batch.chunk(2)
    (module(first).square().mean() + module(second).square().mean()).backward()


def _autocast(module: nn.Module, batch: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(batch).square().mean()
    loss.backward()


def _in_join(module: nn.Module, batch: Tensor) -> None:
    join: Any = getattr(module, "join", nullcontext)
    with join():
        module(batch).square().mean().backward()


# -- networks ------------------------------------------------------------------------------


def _rows(*shape: int) -> Tensor:
    return torch.randint(10_000, shape)


def _embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10_000, 128, sparse=True), nn.Linear(128, 64))


def _convolutions() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(12)
    ]
    return nn.Sequential(*layers)


MLP = Case("MLP", models.mlp, (128, 1024), AT_MOST_ONE, memory=False)
SMALL = Case("200 x linear 64", models.linear_layers, (128, 64), AT_MOST_ONE, memory=False)
ENCODER = Case(
    "transformer", models.transformer, (2, 64, 256), "step 0.95 to 1", memory=False, starts=True
)
MEASURED_MEMORY = ("gradient_as_bucket_view", "static_graph")
"""Options that change what is kept: peak memory takes a minute of launches for each."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "broadcast_buffers=False": {"broadcast_buffers": False},
}
HOOKS: Mapping[str, Mapping[str, Any]] = {
    "all_reduce": {"prepare": _hook("all_reduce", default_hooks.allreduce_hook)},
    "fp16": {"prepare": _hook("fp16", default_hooks.fp16_compress_hook)},
    # PyTorch's bf16 hook refuses the CPU
    "bf16, torch's fp16": {"prepare": _hook("bf16", default_hooks.fp16_compress_hook)},
    "torch's allreduce_hook": {"prepare": _hook(default_hooks.allreduce_hook)},
    "torch's fp16_compress_hook": {"prepare": _hook(default_hooks.fp16_compress_hook)},
    "torch's PowerSGD": {
        "prepare": _hook(power.powerSGD_hook, state=power_sgd),
        "options": {"bucket_cap_mb": LARGE_BUCKET_MB},
    },
}
PROGRAMS: Mapping[str, Callable[[nn.Module, Tensor], None]] = {
    "accumulation of 4": _accumulate,
    "two forwards": _forward_twice,
    "autocast": _autocast,
    "join": _in_join,
}
CASES = [
    *(
        replace(ENCODER, name=f"transformer, {n}", options=o, memory=n in MEASURED_MEMORY)
        for n, o in OPTIONS.items()
    ),
    *(replace(MLP, name=f"MLP, hook {name}", exact=False, **how) for name, how in HOOKS.items()),
    *(replace(MLP, name=f"MLP, {n}", backward=program) for n, program in PROGRAMS.items()),
    Case(
        "sparse embedding",
        _embedding,
        (256, 8),
        AT_MOST_ONE,
        draw=_rows,
        memory=True,
        starts=True,
    ),
    Case("convolutions with batch norm", _convolutions, (8, 16, 16, 16), AT_MOST_ONE, starts=True),
    *(
        replace(case, name=f"{case.name}, {ranks} ranks", ranks=ranks)
        for case in (MLP, SMALL)
        for ranks in (4, 8)
    ),
]
