"""How much memory can still be had, asked before it is taken.

Linux gives out memory until none is left, and then kills a process: there would be no error.
"""

from __future__ import annotations

from pathlib import Path

from gradwire.shm.cgroups import CGROUPS, PROC, folders, number_in, text_of

__all__ = ["check_available"]

_WORTH_ASKING = 4 << 20
"""Asking takes a fraction of a millisecond, about as long as the system needs for so many bytes."""
_CACHES = ("inactive_file", "active_file", "slab_reclaimable")
"""Those of a container that count as available, as in the host's MemAvailable."""
_CGROUP_FILES = (  # limit, use, and those of swap: of version 2 and of version 1
    ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "no file", "no file"),
)


def check_available(size: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raise if `size` bytes more would be too many; what is not known limits nothing.

    Args:
        size: The bytes.
        proc: Where the system tells of its memory.
        cgroups: Where it tells of the limits of groups of processes, such as containers.

    Raises:
        MemoryError: The host, or the container, has less; the message says how much.
    """
    if size < _WORTH_ASKING:
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
    """The bytes that a cgroup is charged for and the kernel takes back on demand."""
    charged = _table(folder / "memory.stat")  # version 1 calls the sum over all inside "total"
    return sum(charged.get(f"total_{name}", charged.get(name, 0)) for name in _CACHES)


def _table(file: Path) -> dict[str, int]:
    """The lines of a file, each a name and a number."""
    lines = (line.split() for line in text_of(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
