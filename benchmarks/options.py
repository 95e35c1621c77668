"""Options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["OWN_WORLDS", "Options"]

OWN_WORLDS = 0
"""The `world_size` of a run whose cases have numbers of ranks of their own."""


@dataclass(frozen=True)
class Options:
    """The command's options, as they are kept beside the figures; `only` empty means all cases.

    `busy` processes compute meanwhile. `hosts` has the number of ranks on each, where there are
    several.
    """

    rounds: int
    backend: str = "gloo"
    world_size: int = 2
    only: Sequence[str] = ()
    busy: int = 0
    hosts: Sequence[int] = field(default_factory=list)
