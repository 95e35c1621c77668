"""Hooks by name, for command lines and configurations."""

from __future__ import annotations

from gradwire.errors import ArgumentError
from gradwire.hooks.averaging import all_reduce, bf16, fp16
from gradwire.hooks.interface import CommHook
from gradwire.hooks.quantization import BlockQuantization

_FUNCTIONS: dict[str, CommHook] = {"all_reduce": all_reduce, "bf16": bf16, "fp16": fp16}
_BITS = {"int8": 8, "int4": 4}


def get_hook(name: str) -> CommHook:
    """Return "all_reduce", "bf16" or "fp16", or a new "int8" or "int4" with its defaults."""
    if name in _BITS:
        return BlockQuantization(_BITS[name])
    if name not in _FUNCTIONS:
        raise ArgumentError(f"hook is {name!r}: choose one of {', '.join([*_FUNCTIONS, *_BITS])}")
    return _FUNCTIONS[name]
