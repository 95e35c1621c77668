"""What the system tells of the limits of groups of processes, such as containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CGROUPS", "PROC", "cores", "folders", "number_in", "text_of"]

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def cores(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """How many cores this process can keep busy; what is not known limits nothing.

    Args:
        proc: Where the system tells of this process's cgroups.
        cgroups: Where it tells of their limits.
    """
    quotas = map(_quota, folders("cpu", proc, cgroups))
    return min([float(len(os.sched_getaffinity(0))), *(q for q in quotas if q is not None)])


def _quota(folder: Path) -> float | None:
    """CPU time per time: of version 2 in one file, of version 1 in two."""
    words = text_of(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota = number_in(folder / "cpu.cfs_quota_us")
    period = number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Where limits of this process may stand: its cgroups' and those of all around them.

    In a container the path may be the one outside, which is not there: the root is then its own.

    Args:
        controller: What is limited, as the kernel calls it; version 2 has one tree for all.
        proc: As for `cores`.
        cgroups: As for `cores`.
    """
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = cgroups / controllers
            folder = root / path.lstrip("/")
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root))


def text_of(file: Path) -> str:
    """What a file says; nothing, where this system, or this container, does not tell."""
    try:
        return file.read_text()
    except OSError:
        return ""


def number_in(file: Path) -> int | None:
    """The number that a file says; None if it is not there, negative, or "max"."""
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None
