"""Verdicts on running jobs: `gradwire explain --live`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gradwire.errors import ArgumentError
from gradwire.recorder import PREFIX, REQUEST, await_answers, describe, modified

ALL = "all"
_PROC = Path("/proc")
_RING = re.compile(r" (/\S.*)/ring-(\d+|of-process-\S+)$", re.MULTILINE)
_SECONDS = 1.2


def directories(target: str) -> list[Path]:
    """Return the directories of dumps that running processes write to.

    Args:
        target: A directory, a process ID, or "all" for all processes of this user on this host.

    Raises:
        ArgumentError: `target` is no directory and no process, or nothing records.
    """
    if target != ALL and not target.isdecimal():
        if not Path(target).is_dir():
            raise ArgumentError(
                f"--live is {target!r}: pass a directory of dumps, a process ID, or {ALL}"
            )
        return [Path(target)]
    pids = list(_pids()) if target == ALL else [int(target)]
    if target != ALL and not (_PROC / target).is_dir():
        raise ArgumentError(f"--live is {target}, and no process of this host has this ID")
    found = {path for pid in pids if (path := directory_of(pid)) is not None}
    return sorted(found)


def directory_of(pid: int) -> Path | None:
    """Return the directory of dumps of a process, which has its ring file mapped; None if none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        match = _RING.search((_PROC / str(pid) / "maps").read_text())
        if match is not None:
            return Path(match[1])
    return None


def ask(directory: Path) -> None:
    """Ask the ranks of a running job for dumps, and wait for them; the job goes on.

    Raises:
        ArgumentError: The directory cannot be written to.
    """
    request = directory / REQUEST
    try:
        request.write_text("gradwire explain --live")
    except OSError as error:
        raise ArgumentError(f"cannot ask the ranks that write to {directory}: {error}") from error
    await_answers(directory, modified(request), PREFIX, _SECONDS)


def without_recorder(pid: int) -> str:
    """Return what py-spy, if it is installed, and the kernel show of a process."""
    found = describe(pid)
    lines = [f"process {pid} does not record. The kernel shows: {_words(found)}"]
    tool = shutil.which("py-spy")
    if tool is not None:
        ended = subprocess.run(
            [tool, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        lines.append(ended.stdout or ended.stderr)
    else:
        lines.append("Install py-spy to see its Python stack, or start it by `gradwire run`.")
    return "\n".join(lines)


def ranks_without_recorder() -> list[int]:
    """Return processes of this user that a launcher has started as ranks and that do not record."""
    return [pid for pid in _pids() if _is_rank(pid) and directory_of(pid) is None]


def _words(found: dict[str, object]) -> str:
    names = ("state", "wait channel", "call", "file", "holder", "child", "command")
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name))


def _pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and path.stat().st_uid == os.getuid():
                yield int(path.name)


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        names = {variable.partition(b"=")[0] for variable in variables}
        return {b"RANK", b"WORLD_SIZE", b"MASTER_PORT"} <= names
    return False
