"""The limits of the process's cgroups, of version 1 and 2: those of its container, for instance."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["CGROUPS", "PROC", "cores", "folders", "number_in", "text_of"]

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def cores(others: Iterable[int] = (), *, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """How many cores processes may use together, by their affinities and this one's quotas.

    Args:
        others: The processes beside this one; those that have ended, or have no number in this
            one's namespace (0), count for nothing.
        proc: Where procfs is mounted.
        cgroups: Where the cgroups' file system is mounted.
    """
    usable = os.sched_getaffinity(0)
    for process in others:
        with suppress(OSError):
            usable |= os.sched_getaffinity(process)
    quotas = map(_quota, folders("cpu", proc, cgroups))
    return min([float(len(usable)), *(q for q in quotas if q is not None)])


def _quota(folder: Path) -> float | None:
    """A cgroup's quota in cores; None for no limit. Version 2 has it in one file, 1 in two."""
    words = text_of(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota = number_in(folder / "cpu.cfs_quota_us")
    period = number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and its ancestors.

    In a container the path in /proc may be the host's, which does not exist inside: the mounted
    root is then the container's own cgroup.

    Args:
        controller: The kernel's name of it, "cpu" for instance; version 2 has one tree for all.
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
    """A file's text; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def number_in(file: Path) -> int | None:
    """The number in a file; None if it cannot be read, is negative, or "max"."""
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None
