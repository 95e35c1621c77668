"""Puts objects of ours in place of PyTorch's, in every module that offers them, and back."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Replacement", "is_installed", "put", "put_back"]


@dataclass(frozen=True)
class Replacement:
    """One object of ours and where it goes.

    Attributes:
        value: Ours.
        name: What PyTorch calls it.
        modules: Every module of PyTorch that holds it under that name.
    """

    value: object
    name: str
    modules: tuple[str, ...]


_originals: list[tuple[str, str, object]] = []


def is_installed() -> bool:
    """Whether a table is in place."""
    return bool(_originals)


def put(table: Iterable[Replacement]) -> None:
    """Put everything in a table in place; if one name is not there, nothing."""
    try:
        for entry in table:
            for module_name in entry.modules:
                module = importlib.import_module(module_name)
                _originals.append((module_name, entry.name, getattr(module, entry.name)))
                setattr(module, entry.name, entry.value)
    except BaseException:
        put_back()
        raise


def put_back() -> None:
    """Put PyTorch's own objects back."""
    while _originals:
        module_name, name, original = _originals.pop()
        setattr(importlib.import_module(module_name), name, original)
