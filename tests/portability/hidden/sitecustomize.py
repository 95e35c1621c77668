"""Hide from gradwire what macOS or Windows lacks, in each process with this folder on PYTHONPATH.

The variable SEEN_SYSTEM has the `sys.platform` that gradwire's modules see; the standard library,
PyTorch and the tests go on seeing Linux. A name that is hidden raises AttributeError, a module
ModuleNotFoundError, and a file of /proc FileNotFoundError, as on that system.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

SYSTEM = os.environ["SEEN_SYSTEM"]
WINDOWS = SYSTEM == "win32"
HIDDEN = {  # names that neither has, and then those that only macOS has
    os: (
        "memfd_create eventfd posix_fallocate sched_getaffinity pidfd_open O_TMPFILE",
        "fork register_at_fork getuid geteuid uname getloadavg pread killpg setsid getpgid waitid "
        "get_blocking set_blocking WNOHANG statvfs",
    ),
    signal: ("SIGRTMAX SIGRTMIN", "SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGBUS SIGSTOP SIGALRM"),
    socket: (
        "SOCK_SEQPACKET SO_PEERCRED MSG_CMSG_CLOEXEC",
        "AF_UNIX send_fds recv_fds SCM_RIGHTS CMSG_LEN socketpair",
    ),
    select: ("epoll", "poll POLLIN POLLOUT"),
    faulthandler: ("", "register unregister"),
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC clock_gettime"),
    mmap: ("MADV_HUGEPAGE", "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE"),
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty") if WINDOWS else ()
FOLDERS = ("/proc", "/sys/fs", "/dev/shm", "/dev/fd")
STEPS = ("pathlib", "contextlib", "shutil", "io", "os", "ctypes")


def asked_by_gradwire(steps: tuple[str, ...] = ()) -> bool:
    """Return True if the code that asks, or had these modules of Python's ask, is gradwire's."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in steps:
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith("gradwire"))


def hide(module: ModuleType, values: dict[str, Any]) -> None:
    """Give a module a class whose properties answer gradwire with these values, if any."""

    def answers(name: str, theirs: Any) -> property:
        def get(self: ModuleType) -> Any:
            if not asked_by_gradwire():
                return theirs
            if name in values and values[name] is not AttributeError:
                return values[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        return property(get, lambda self, value: self.__dict__.__setitem__(name, value))

    here = [name for name in values if hasattr(module, name)]
    own: dict[str, Any] = {name: answers(name, getattr(module, name)) for name in here}
    # pickled by its name, like other modules, among them those that Python makes by `type(sys)`
    own["__reduce__"] = lambda self: (import_module, (self.__name__,))
    module.__class__ = type("Seen", (ModuleType,), own)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse files of Linux, and on Windows also libraries without a name and files in use."""
    if event in ("open", "os.listdir", "os.scandir"):
        if str(arguments[0]).startswith(FOLDERS) and asked_by_gradwire(STEPS):
            raise FileNotFoundError(2, "hidden", arguments[0])
    elif WINDOWS and event == "ctypes.dlopen" and not arguments[0] and asked_by_gradwire(STEPS):
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    elif WINDOWS and event in ("os.rename", "os.remove") and asked_by_gradwire(STEPS):
        for path in {os.path.realpath(each) for each in arguments if isinstance(each, str)}:
            if path in open_files():
                raise PermissionError(13, "in use by this process", path)


def open_files() -> set[str]:
    """Return the paths of the files that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def without_proc(readlink: Callable[..., Any]) -> Callable[..., Any]:
    def read(path: Any, **options: Any) -> Any:
        if str(path).startswith(FOLDERS) and asked_by_gradwire(STEPS):
            raise FileNotFoundError(2, "hidden", path)
        return readlink(path, **options)

    return read


def imports(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def load(name: str, *arguments: Any, **options: Any) -> Any:
        if name in MODULES and asked_by_gradwire():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return theirs(name, *arguments, **options)

    return load


def without_posix(start: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        for name in ("preexec_fn", "pass_fds", "start_new_session"):
            if options.get(name) and asked_by_gradwire():
                raise ValueError(f"{name} is not supported on Windows platforms")
        start(self, *arguments, **options)

    return init


ctypes.CDLL(None)  # ctypes has its own by now
for _module, (_both, _windows) in HIDDEN.items():
    _names = f"{_both} {_windows if WINDOWS else ''}".split()
    hide(_module, dict.fromkeys(_names, AttributeError) | ({"name": "nt"} if WINDOWS else {}))
hide(sys, {"platform": SYSTEM})
os.readlink = without_proc(os.readlink)
builtins.__import__ = imports(builtins.__import__)
if WINDOWS:
    subprocess.Popen.__init__ = without_posix(subprocess.Popen.__init__)  # type: ignore[method-assign]
sys.addaudithook(watch)
