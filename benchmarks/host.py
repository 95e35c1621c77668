"""The facts of a host on which its figures depend."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from gradwire._version import __version__

__all__ = ["Host", "this_host"]


@dataclass(frozen=True)
class Host:
    """Host and versions of a measurement."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    torch: str
    gradwire: str


def this_host() -> Host:
    return Host(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        gradwire=__version__,
    )


def _cpu() -> str:
    """The CPU's name where Linux gives one (not on all architectures), or its architecture."""
    named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()
