"""The progress of a running benchmark, on stderr."""

from __future__ import annotations

import sys

import torch.distributed as dist

__all__ = ["say"]


def say(text: str) -> None:
    """Prints a line to stderr, once: from rank 0, or from the process that starts the ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"  {text} …", file=sys.stderr, flush=True)
