"""Limits on cores and memory, of the host and of the process's cgroups (versions 1 and 2).

A container's limits are those of a cgroup. Memory is checked before each allocation: Linux
allocates shared memory until none is left, and then kills a process without an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def cores(others: Iterable[int] = (), *, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the cores that processes may use together, by affinities and this one's quotas."""
    if not hasattr(os, "sched_getaffinity"):
        return float(os.cpu_count() or 1)
    usable = os.sched_getaffinity(0)
    # Processes that have ended, or have no pid in this process's namespace (0), do not count.
    for process in others:
        with suppress(OSError):
            usable |= os.sched_getaffinity(process)
    quotas = map(_quota, _folders("cpu", proc, cgroups))
    return min([float(len(usable)), *(q for q in quotas if q is not None)])


def _quota(folder: Path) -> float | None:
    """Return a cgroup's quota in cores, None for no limit; one file in version 2, two in 1."""
    words = _text_of(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota = _number_in(folder / "cpu.cfs_quota_us")
    period = _number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors."""
    for line in _text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree for all controllers.
        if not controllers or controller in controllers.split(","):
            root = cgroups / controllers
            folder = root / path.lstrip("/")
            # In a container the path in /proc may be that of the host, which does not exist inside.
            # The mounted root is then the container's own cgroup.
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root))


def _text_of(file: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _number_in(file: Path) -> int | None:
    """Return the number in a file; None if it cannot be read, is negative, or "max"."""
    text = _text_of(file).strip()
    return int(text) if text.isdigit() else None


def oom_kills(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the number of processes of this container that the out-of-memory killer ended."""
    for folder in _folders("memory", proc, cgroups):
        for file in ("memory.events", "memory.oom_control"):
            for line in _text_of(folder / file).splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.strip().isdigit():
                    return int(number)
    return 0


_CHECKED_FROM = 4 << 20
"""Minimum size that is checked: a check takes 0.3 ms, as long as allocating about 1 MiB."""
_CACHES = ("inactive_file", "active_file", "slab_reclaimable")
"""Caches that a cgroup is charged for and the kernel reclaims, as in the host's MemAvailable."""
_CGROUP_FILES = (  # limit and usage, of memory and of swap: of cgroups version 2 and version 1
    ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "no file", "no file"),
)


def check_available(size: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raise unless `size` more bytes can be allocated; ignore limits that cannot be read."""
    if size < _CHECKED_FROM:
        return
    host = {name: kib << 10 for name, kib in _table(proc / "meminfo").items()}
    if "MemAvailable:" not in host:
        return
    swap = host.get("SwapFree:", 0)
    _check("the host", size, host["MemAvailable:"] + swap)
    for folder in _folders("memory", proc, cgroups):
        for limit_file, use_file, *swap_files in _CGROUP_FILES:
            limit = _number_in(folder / limit_file)
            use = None if limit is None else _number_in(folder / use_file)
            if limit is None or use is None or size <= limit - use:
                continue
            swap_limit, swap_use = (_number_in(folder / name) for name in swap_files)
            if swap_limit is not None and swap_use is not None:
                swap = min(swap, max(0, swap_limit - swap_use))
            charged = _table(folder / "memory.stat")  # version 1: "total_" is with descendants
            caches = sum(charged.get(f"total_{name}", charged.get(name, 0)) for name in _CACHES)
            left = limit - use + caches + swap
            _check(f"its memory limit ({folder})", size, left)


def _check(name: str, size: int, left: int) -> None:
    if size > left:
        raise MemoryError(f"{name} leaves {max(0, left)} bytes")


def _table(file: Path) -> dict[str, int]:
    """Return a file's lines of a name and a number as a dict."""
    lines = (line.split() for line in _text_of(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
