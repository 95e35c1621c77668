"""Hooks by name, for scripts that take one from the command line or a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import ArgumentError
from gradwire.hooks.auto.candidates import COMPRESSING
from gradwire.hooks.auto.hook import auto
from gradwire.hooks.averaging import all_reduce
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.cast import bf16, fp16
from gradwire.hooks.protocol import CommHook
from gradwire.hooks.result import as_future

__all__ = ["get_hook", "noop"]


def noop(state: Any, bucket: GradBucket) -> torch._C.Future[Tensor]:
    """Communicate nothing: gradients stay local, to measure what communication costs."""
    return as_future(bucket.buffer(), noop)


noop.single_collective = noop.linear = True  # type: ignore[attr-defined]


PLAIN: dict[str, CommHook] = {h.__name__: h for h in (all_reduce, bf16, fp16, noop)}
MADE: dict[str, Callable[[], CommHook]] = {**COMPRESSING, "auto": auto}


def get_hook(name: str) -> CommHook:
    """A hook of this package by its name.

    Args:
        name: "all_reduce", "bf16", "fp16" or "noop"; or, of those that compress, "int8", "int4",
            "low_rank", "sign" or "top_k", and "auto": a new one each time, with its defaults.

    Raises:
        ArgumentError: There is no such hook; the message lists those there are.

    Example:
        >>> get_hook("bf16").__name__
        'bf16'
        >>> get_hook("int4").bits
        4
    """
    if name in MADE:
        return MADE[name]()
    if name not in PLAIN:
        named = ", ".join([*PLAIN, *MADE])
        raise ArgumentError(f"hook is {name!r}: the hooks by name are {named}")
    return PLAIN[name]
