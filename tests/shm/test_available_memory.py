"""Checks of available memory: errors on all ranks before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire._limits import check_available, cores
from gradwire.errors import BrokenGroupError, DistributedError, PeerFailedError
from gradwire.shm import segment

GIB = 1 << 30
MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  {available} kB\nSwapFree:  {swap} kB\n"


def host(
    root: Path,
    *,
    cgroup: str = "0::/",
    files: dict[str, str] | None = None,
    available: int = 4 * GIB,
    swap: int = 0,
) -> dict[str, Path]:
    """A system that has 4 GiB, and the given files; for `check_available`."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"{cgroup}\n")
    (proc / "meminfo").write_text(MEMINFO.format(available=available >> 10, swap=swap >> 10))
    for name, text in (files or {}).items():
        file = cgroups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return {"proc": proc, "cgroups": cgroups}


def limited(limit: object, used: int, **more: object) -> dict[str, str]:
    return {f"memory.{k}": str(v) for k, v in {"max": limit, "current": used, **more}.items()}


CACHES = f"anon {GIB}\nfile {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}"
NO_SWAP = {"memory.swap.max": "0", "memory.swap.current": "0"}
POD = {"pod/memory.max": str(GIB), "pod/memory.current": "0"}
WORKER = {"pod/worker/memory.max": "max", "pod/worker/memory.current": "0"}
V1 = {
    "memory.limit_in_bytes": str(2 * GIB),
    "memory.usage_in_bytes": str(GIB),
    "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
}
V1_GROUP = "5:cpu:/\n4:memory:/docker/1234\n0::/"


@pytest.mark.parametrize(
    ("cgroup", "files", "swap", "expected"),
    [
        ("0::/", {}, GIB, 5 * GIB),
        ("0::/", limited(2 * GIB, 2 * GIB, stat=CACHES), 0, GIB * 3 // 4),
        ("0::/", limited(2 * GIB, GIB) | NO_SWAP, 8 * GIB, GIB),
        ("0::/pod/worker", POD | WORKER, 0, GIB),
        (V1_GROUP, {f"memory/docker/1234/{k}": v for k, v in V1.items()}, 0, GIB * 3 // 2),
        (V1_GROUP, {f"memory/{k}": v for k, v in V1.items()}, 0, GIB * 3 // 2),
    ],
    ids=["swap", "without caches", "limit of swap", "narrowest", "v1 outside", "v1 inside"],
)
def test_available_memory(
    tmp_path: Path, cgroup: str, files: dict[str, str], swap: int, expected: int
) -> None:
    folders = host(tmp_path, cgroup=cgroup, files=files, swap=swap)
    check_available(expected, **folders)
    with pytest.raises(MemoryError):
        check_available(expected + (1 << 20), **folders)


def test_unknown_limits_are_ignored(tmp_path: Path) -> None:
    check_available(1 << 50, proc=tmp_path / "none", cgroups=tmp_path / "none")


def memory_of_host() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1]) << 10


def test_nothing_is_allocated_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was taken"))
    before = len(os.listdir("/proc/self/fd"))
    for size in (1 << 50, 4 * memory_of_host()):
        with pytest.raises(
            DistributedError, match=rf"not enough memory for {size} .* leaves \d+ bytes.*free"
        ):
            segment.create(size)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.on_ranks(2)
def test_a_tensor_that_does_not_fit_is_refused_and_the_group_goes_on():
    """An allocation is one rank's alone: it fails there, and the group goes on."""
    sizes = [1 << 50, (1 << 32, 1 << 32), 1 << 70]
    if dist.get_rank() == 0:
        for shape in sizes:
            with pytest.raises(DistributedError, match=r"not enough memory for \d{16,} bytes"):
                gradwire.shm.empty(shape, dtype=torch.uint8)
    x = torch.ones(300_000)
    dist.all_reduce(x)
    assert x[0] == 2


@pytest.mark.on_ranks(3)
def test_a_collective_without_memory_for_staging_fails_on_every_rank():
    """Rank 1 has none: no rank waits for it."""
    group = dist.new_group(backend="shm")
    x = torch.ones(300_000)
    original = segment.check_available
    if dist.get_rank() == 1:
        segment.check_available = no_memory
    try:
        with pytest.raises(DistributedError, match="the host leaves 0 bytes") as caught:
            dist.all_reduce(x, group=group)
    finally:
        segment.check_available = original
    with pytest.raises(BrokenGroupError, match="make a new one"):
        dist.all_reduce(x, group=group)
    dist.barrier()
    assert caught.type is (DistributedError if dist.get_rank() == 1 else PeerFailedError)


def no_memory(size):
    raise MemoryError("the host leaves 0 bytes")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job", {"job/cpu.max": "50000 100000"}, 0.5),
        ("0::/job/part", {"job/cpu.max": "50000 100000", "job/part/cpu.max": "max 100000"}, 0.5),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25),
        (
            "3:cpu,cpuacct:/gone",
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {}, None),
    ],
)
def test_a_cgroup_s_quota_limits_the_cores(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    folders = host(tmp_path, cgroup=cgroup, files=files)
    assert cores(**folders) == (expected or len(os.sched_getaffinity(0)))
