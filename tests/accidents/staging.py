"""Stage a drawn accident: `gradwire run`, then `gradwire explain`, in forks of this process.

PyTorch is imported once, since that takes most of the time of a short run: this process, which has
not imported gradwire, forks the launcher, and the launcher forks one process per rank before it
starts. A fork then does what `import torch` does at its end, and runs as the command would.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # gradwire is loaded in the forks

import torch
import torch._dynamo  # imported before forking, like the following modules, to save time
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor
import torch.nn.parallel
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.flight_recorder.components import builder, config_manager, loader

LIMIT = 60.0  # of a run; then the launcher is interrupted, as by Ctrl-C
_END = 40.0  # of the launcher after that: torchrun waits 30 s; and of `gradwire explain`
_ALARM = 150  # no process lives longer, whatever happens to this one
_PR_SET_CHILD_SUBREAPER = 36
_FAILED = re.compile(r"failed \(exitcode: \S+\) local_rank: (\d+)")


class Become(BaseException):
    """Raised in a fork: unwinds the stack, so that `main` runs at the top of the program."""

    def __init__(self, main: Callable[[], object]) -> None:
        super().__init__()
        self.main = main


class Run:
    """Exit code, verdict, and the ranks that torchrun and torch's analyzer of records name."""

    def __init__(self, code: int | None, folder: Path) -> None:
        self.code = code
        self.verdict: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            self.verdict = json.loads((folder / "verdict.json").read_text())
        failed = _FAILED.search((folder / "log.txt").read_text(errors="replace"))
        self.torchrun = {int(failed[1])} if failed else set()
        self.analyzer = _analyze(folder / "dumps")


def stage(source: str, folder: Path, world: int, *, load: int = 0) -> Run:
    """Run a program on ranks until its end, beside `load` busy processes, and explain it."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(source)
    run = ["run", "--standalone", f"--nproc-per-node={world}", "--recorder", "dumps", "train.py"]
    owner = os.getpid()
    read, write = os.pipe()  # a terminal at which nobody types
    try:
        for _ in range(load):
            _fork(_be_busy)
        launcher = _start(run, folder, "log.txt", world, stdin=read)
        code = _await(launcher, LIMIT)
        if code is None:
            os.kill(launcher, signal.SIGINT)
            code = _await(launcher, _END)
        _await(_explain(folder), _END)
    finally:
        if os.getpid() == owner:  # forks unwind their stacks, too
            kill_all()
            os.close(read)
            os.close(write)
    return Run(code, folder)


def explain_again(folder: Path) -> dict[str, Any]:
    """Return the verdict on the dumps of a run as they are now."""
    (folder / "verdict.json").unlink()
    owner = os.getpid()
    try:
        _await(_explain(folder), _END)
    finally:
        if os.getpid() == owner:
            kill_all()
    with contextlib.suppress(ValueError):
        return dict(json.loads((folder / "verdict.json").read_text()))
    return {}


def _explain(folder: Path) -> int:
    return _start(["explain", "dumps", "--json"], folder, "verdict.json", 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def be_reaper() -> None:
    """Adopt all processes that this one's children leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_all() -> None:
    """Kill all processes that this one and its children have started."""
    while pids := _descendants():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants() -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _fork(main: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        raise Become(main)
    return pid


def _await(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child, or None if it still runs after a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.03)
    return None


def _start(arguments: list[str], folder: Path, output: str, world: int, *, stdin: int = -1) -> int:
    """Start `gradwire ARGUMENTS` in a folder, and return its process."""

    def be() -> None:
        _enter(folder, output, stdin)
        _be_command(arguments, [_fork_rank() for _ in range(world)])

    return _fork(be)


def _enter(folder: Path, output: str, stdin: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(_ALARM)
    os.chdir(folder)
    out = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(stdin if stdin >= 0 else os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out if output.endswith(".txt") else os.open("errors.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.closerange(3, 1024)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _be_busy() -> NoReturn:
    signal.alarm(_ALARM)
    while True:
        pass


def _be_command(arguments: list[str], ranks: list[tuple[int, int]]) -> None:
    """Be the command, whose ranks are the given processes in place of new ones."""

    def popen(self: Any, args: Any, env: dict[str, str]) -> subprocess.Popen[bytes]:
        pid, request = ranks.pop(0)
        program = list(args)[args.index("-u") + 1 :]
        with os.fdopen(request, "w") as file:
            json.dump([program, dict(env)], file)
        return _Forked(pid, args)

    SubprocessHandler._popen = popen
    torch._import_device_backends()
    sys.argv = ["gradwire", *arguments]
    from gradwire.cli import main

    main()


class _Forked(subprocess.Popen[bytes]):
    def __init__(self, pid: int, args: Any) -> None:
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


_requests: list[int] = []


def _fork_rank() -> tuple[int, int]:
    """Fork a rank, which waits for its program; return its process and the pipe to it."""
    read, write = os.pipe()
    _requests.append(write)
    return _fork(lambda: _be_rank(read)), write


def _be_rank(read: int) -> None:
    for request in _requests:  # those of other ranks, too
        os.close(request)
    os.setsid()
    signal.alarm(_ALARM)
    with os.fdopen(read) as file:
        text = file.read()
    if not text:
        os._exit(0)  # the launcher has ended
    program, variables = json.loads(text)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = program
    torch._import_device_backends()
    path = os.path.abspath(program[0])
    names = sys.modules["__main__"].__dict__
    names |= {"__file__": path, "__name__": "__main__"}
    exec(compile(Path(path).read_text(), program[0], "exec"), names)


def _analyze(dumps: Path) -> set[int]:
    """Return the missing and differing ranks that torch's analyzer finds."""
    arguments = config_manager.JobConfig().parse_args(
        [str(dumps), "--prefix", "rank_", "--allow-incomplete-ranks"]
    )
    logging.disable()  # it logs what it finds
    try:
        details, version = loader.read_dir(arguments)
        collectives = builder.build_db(details, arguments, version).collectives
    except (Exception, SystemExit):  # it cannot read these
        return set()
    finally:
        logging.disable(logging.NOTSET)
    return {
        int(rank)
        for each in collectives
        for rank in {*(each.missing_ranks or ()), *(each.mismatch_collectives or ())}
    }
