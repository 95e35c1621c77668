"""Hooks by name, for command lines and configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.compression import BlockQuantization, Compressor, LowRank, Sign, TopK
from gradwire.hooks.result import as_future
from gradwire.hooks.stateful import CommHook
from gradwire.hooks.wrapping import bf16, fp16


def noop(state: Any, bucket: GradBucket) -> torch._C.Future[Tensor]:
    """Leave gradients local, to measure the cost of communication."""
    return as_future(bucket.buffer(), noop)


noop.single_collective = noop.linear = True  # type: ignore[attr-defined]


PLAIN: dict[str, CommHook] = {h.__name__: h for h in (all_reduce, bf16, fp16, noop)}
COMPRESSING: dict[str, Callable[[], Compressor]] = {
    "int8": lambda: BlockQuantization(8),
    "int4": lambda: BlockQuantization(4),
    "low_rank": LowRank,
    "sign": Sign,
    "top_k": TopK,
}


def get_hook(name: str) -> CommHook:
    """Return a hook of gradwire by its name.

    Args:
        name: "all_reduce", "bf16", "fp16" or "noop"; or, for a new hook with its defaults, "int8",
            "int4", "low_rank", "sign" or "top_k".

    Raises:
        ArgumentError: There is no hook of this name. The message lists the names.

    Example:
        >>> get_hook("bf16").__name__
        'bf16'
        >>> get_hook("int4").bits
        4
    """
    if name in COMPRESSING:
        return COMPRESSING[name]()
    if name not in PLAIN:
        named = ", ".join([*PLAIN, *COMPRESSING])
        raise ArgumentError(f"hook is {name!r}: choose one of {named}")
    return PLAIN[name]
