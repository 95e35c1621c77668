"""The memory that the host and the process's cgroups leave, checked before each allocation.

Linux allocates shared memory until none is left, and then kills a process: there is no error.
"""

from __future__ import annotations

from pathlib import Path

from gradwire.shm.cgroups import CGROUPS, PROC, folders, number_in, text_of

__all__ = ["check_available"]

_CHECKED_FROM = 4 << 20
"""Smaller sizes are not checked: a check takes 0.3 ms, as long as allocating about 1 MiB."""
_CACHES = ("inactive_file", "active_file", "slab_reclaimable")
"""A cgroup's caches that count as available, as in the host's MemAvailable."""
_CGROUP_FILES = (  # limit and usage, of memory and of swap: of cgroups version 2 and version 1
    ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "no file", "no file"),
)


def check_available(size: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raise unless `size` more bytes can be allocated; limits that cannot be read do not count.

    Args:
        size: In bytes.
        proc: Where procfs is mounted.
        cgroups: Where the cgroups' file system is mounted.

    Raises:
        MemoryError: The host or a cgroup has less; the message says how much.
    """
    if size < _CHECKED_FROM:
        return
    host = {name: kib << 10 for name, kib in _table(proc / "meminfo").items()}
    if "MemAvailable:" not in host:
        return
    swap = host.get("SwapFree:", 0)
    _check("the host", size, host["MemAvailable:"] + swap)
    for folder in folders("memory", proc, cgroups):
        for limit_file, use_file, *swap_files in _CGROUP_FILES:
            limit = number_in(folder / limit_file)
            use = None if limit is None else number_in(folder / use_file)
            if limit is None or use is None or size <= limit - use:
                continue
            swap_limit, swap_use = (number_in(folder / name) for name in swap_files)
            if swap_limit is not None and swap_use is not None:
                swap = min(swap, max(0, swap_limit - swap_use))
            left = limit - use + _reclaimable(folder) + swap
            _check(f"its memory limit ({folder})", size, left)


def _check(name: str, size: int, left: int) -> None:
    if size > left:
        raise MemoryError(f"{name} leaves {max(0, left)} bytes")


def _reclaimable(folder: Path) -> int:
    """The bytes that a cgroup is charged for and the kernel reclaims on demand."""
    charged = _table(folder / "memory.stat")  # in version 1, "total_" is the sum over descendants
    return sum(charged.get(f"total_{name}", charged.get(name, 0)) for name in _CACHES)


def _table(file: Path) -> dict[str, int]:
    """A file's lines of a name and a number."""
    lines = (line.split() for line in text_of(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
