"""The command `gradwire explain`: rank, line and parameter that caused a failure, on one screen."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError, NotSupportedError, require_linux
from gradwire.recorder import REQUEST, await_answers, describe, modified
from gradwire.recorder.verdict import list_ranks

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from rich.console import Console

    from gradwire.recorder.verdict import Verdict

_FOUND = 1  # exit code if something failed
_INTERRUPTED = 130
_DETAILS, _WIDTH = 10, 300  # number of lines after the first four, and their length
_ALL = "all"
_PROC = Path("/proc")
_RING = re.compile(r" (/\S.*)/ring-(\d+|of-process-\S+)$", re.MULTILINE)
_ANSWER_SECONDS = 1.2

EXAMPLES = """\b
Examples:
    gradwire explain --live all          # a job that hangs on this host
    gradwire run --nproc-per-node 4 --recorder dumps train.py
    gradwire explain dumps
    gradwire explain /tmp --prefix nccl_trace_rank_    # dumps of PyTorch's flight recorder
"""


@click.command(epilog=EXAMPLES)
@click.argument(
    "directory", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False
)
@click.option("--prefix", help="Prefix of file names.  [default: the most common one]")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--live",
    metavar="DIR|PID|all",
    help="Ask running ranks first: those that write to DIR, of PID's job, or all of this host.",
)
def explain(directory: Path | None, prefix: str | None, as_json: bool, live: str | None) -> None:
    """Name the rank and the cause of a failure from the dumps in DIRECTORY.

    Reads dumps of gradwire's recorder and of PyTorch's flight recorder (Gloo, NCCL). With --live,
    asks a job that runs or hangs, and lets it go on. The exit code is 0 if nothing failed and 1
    otherwise.
    """
    if (directory is None) == (live is None):
        raise click.UsageError("pass DIRECTORY, or --live with a directory, a process ID or all")
    try:
        if directory is not None:
            sys.exit(_explain(directory, prefix, as_json))
        sys.exit(_explain_live(live or "", as_json))
    except (ArgumentError, NotSupportedError) as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _explain(directory: Path, prefix: str | None, as_json: bool, *, live: bool = False) -> int:
    from rich.console import Console

    from gradwire.recorder.verdict import explain as explain_dumps

    verdict = explain_dumps(directory, prefix, live=live)
    if as_json:
        click.echo(json.dumps(asdict(verdict), indent=2))
    else:
        show_verdict(Console(highlight=False), verdict)
    return 0 if verdict.healthy else _FOUND


def _explain_live(target: str, as_json: bool) -> int:
    found = directories(target)
    code = 0
    for path in found:
        _ask(path)
        if not as_json:
            click.echo(f"{path}:")
        code = max(code, _explain(path, None, as_json, live=True))
    if found:
        return code
    pids = [int(target)] if target.isdecimal() else [*filter(_is_rank, _pids())]
    for pid in pids:
        click.echo(_without_recorder(pid))
    if not pids:
        raise ArgumentError(
            "no process of this user on this host records, or is a rank: start the job with "
            "`gradwire run`, or with GRADWIRE_RECORDER=dumps in its environment"
        )
    return code


def show_verdict(console: Console, verdict: Verdict, torchruns: int | None = None) -> None:
    """Print a verdict in four lines and some details; `torchruns` is the rank that torchrun names.

    A run without failure gets one line. Lines are not wrapped: terminals and pagers do that.
    """
    finding, *others = verdict.findings
    title = f"{finding.kind}: {finding.summary}"
    who = list_ranks(finding.ranks) if finding.ranks else "not known"
    known = [verdict.processes[rank] for rank in finding.ranks if rank in verdict.processes]
    who += f" ({', '.join(known)})" if 0 < len(known) <= 3 else ""
    details, last = [*finding.details], "; ".join(verdict.notes)
    if finding.kind == "nothing":
        console.print(title, markup=False, soft_wrap=True)
    else:
        sure = "" if finding.confidence == "certain" else f" ({finding.confidence})"
        for word, text, style in (
            ("Who", who, "bold red" if not verdict.healthy else "bold"),
            ("Where", "; ".join(map(_with_source, finding.places[:2])) or "not known", "cyan"),
            ("Why", title + sure, ""),
            ("Do", "; ".join(finding.remedies[:3]), ""),
        ):
            console.print(f"{word:6} {text}", style=style, markup=False, soft_wrap=True)
        details += [f"also {each.kind}: {each.summary}" for each in others]
        count = f"{len(verdict.dumps)} dumps of {verdict.world_size} ranks"
        last = "; ".join([count, *verdict.notes])
    if finding.ranks and torchruns not in (None, *finding.ranks):
        text = f"torchrun's block above names rank {torchruns}, whose process ended first; "
        details.insert(0, f"{text}what ended it comes from {list_ranks(finding.ranks)}")
    if len(details) >= _DETAILS:
        details[_DETAILS - 2 :] = [f"… and {len(details) - _DETAILS + 2} more; --json shows them"]
    for line in filter(None, (*details, last)):
        shown = line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
        console.print(f"  {shown}", style="dim", markup=False, soft_wrap=True)


def _with_source(place: str) -> str:
    file, _, line = place.rpartition(":")
    source = linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
    return f"{place}  {source[:80]}" if source else place


# --- running jobs ---


def directories(target: str) -> list[Path]:
    """Return the directories of dumps that running processes write to."""
    if target != _ALL and not target.isdecimal():
        if not Path(target).is_dir():
            raise ArgumentError(
                f"--live is {target!r}: pass a directory of dumps, a process ID, or {_ALL}"
            )
        return [Path(target)]
    require_linux(f"--live {target}")
    pids = list(_pids()) if target == _ALL else [int(target)]
    if target != _ALL and not (_PROC / target).is_dir():
        raise ArgumentError(f"--live is {target}, and no process of this host has this ID")
    found = {path for pid in pids if (path := _directory_of(pid)) is not None}
    return sorted(found)


def _directory_of(pid: int) -> Path | None:
    """Return the directory of dumps of a process, which has its ring file mapped; None if none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if match := _RING.search((_PROC / str(pid) / "maps").read_text()):
            return Path(match[1])
    return None


def _ask(directory: Path) -> None:
    """Ask the ranks of a running job for dumps, and wait for them; the job goes on."""
    request = directory / REQUEST
    try:
        request.write_text("gradwire explain --live")
    except OSError as error:
        raise ArgumentError(f"cannot ask the ranks that write to {directory}: {error}") from error
    await_answers(directory, modified(request), _ANSWER_SECONDS)


def _without_recorder(pid: int) -> str:
    """Return what the kernel shows of a process."""
    found = describe(pid)
    names = ("state", "wait channel", "call", "file", "holder", "child", "command")
    shown = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    return (
        f"process {pid} does not record. The kernel shows: {shown}\n"
        f"See its Python stack by `py-spy dump --pid {pid}`, or start it by `gradwire run`."
    )


def _pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and path.stat().st_uid == os.getuid():
                yield int(path.name)


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return {b"RANK", b"WORLD_SIZE", b"MASTER_PORT"} <= {v.split(b"=")[0] for v in variables}
    return False
