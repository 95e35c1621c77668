"""What a user chooses for a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The command's options, as they are kept beside the figures; `only` empty means all cases.

    `busy` processes compute meanwhile.
    """

    rounds: int
    backend: str = "gloo"
    world_size: int = 2
    only: Sequence[str] = ()
    busy: int = 0
