"""Processes that compute all the time, so that ranks have to share the cores with others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.multiprocessing as mp

__all__ = ["busy"]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep that many processes busy within the block."""
    processes = [
        mp.get_context("spawn").Process(target=_spin, args=(os.getpid(),), daemon=True)
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))
