"""Peak memory of training, for each contender in processes of its own (Linux).

What is counted is resident memory above what was there before the wrapper was built: gradients,
buckets, activations and whatever the contender keeps, in pages that were really touched.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.launch import launch
from benchmarks.models import mlp
from benchmarks.options import Options
from benchmarks.training import BARE, Case, Training, wrappers

__all__ = ["peak", "peak_of"]

STEPS = 5
"""Enough for both contenders to have rebuilt their buckets, and to reuse what they keep."""
TINY = Case("warm-up", partial(mlp, layers=1, width=8), (1, 8), "")
RESET_PEAK = "5"
"""Value for clear_refs that resets the peak memory (proc(5))."""


def peak(case: Case, name: str, options: Options) -> float:
    """Megabytes above the start, of the rank with most."""
    backend = options.backend
    return launch(_peak, case, name, backend, world_size=options.world_size, backend=backend)


def _peak(case: Case, name: str, backend: str) -> float:
    contenders = wrappers(backend)
    Training(TINY).wrap(contenders[name]).step()
    Training(case).wrap(contenders[BARE]).step()
    training = Training(case)

    def wrap_and_step() -> None:
        training.wrap(contenders[name])
        for _ in range(STEPS):
            training.step()

    return peak_of(wrap_and_step)


def peak_of(work: Callable[[], None]) -> float:
    """Megabytes above the start while the work is done, of the rank with most."""
    _give_back()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
    start = _status("VmRSS")
    work()
    above = torch.tensor((_status("VmHWM") - start) / 1e3, dtype=torch.float64)
    dist.all_reduce(above, dist.ReduceOp.MAX)
    return above.item()


def _give_back() -> None:
    """Returns freed memory to the system, so that using it again is counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> float:
    """Kilobytes of a field of this process's status."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1.024
