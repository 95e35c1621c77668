"""Time for a dump when C code aborts this process, as Gloo does after a message of another size.

The thread that aborts may be one of C, and no handler may run Python in it. So faulthandler, which
runs first, is followed by libc's `sleep`, whose argument is then the signal's number. In these 6 s
the recorder's thread writes a dump and ends the process. It cannot if the thread that aborts holds
the GIL: then the process ends when they are over.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_REPORT = b"Fatal Python error: Aborted"
if _LIBC is not None:
    _LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    _LIBC.signal.restype = ctypes.c_void_p


def delay_aborts() -> bool:
    """Delay the end of a process that is aborted; return False if it has its own handler."""
    if _LIBC is None:
        return False
    earlier = _LIBC.signal(signal.SIGABRT, ctypes.cast(_LIBC.sleep, ctypes.c_void_p))
    if earlier:
        _LIBC.signal(signal.SIGABRT, earlier)
    return not earlier


def abort_at_once() -> None:
    """Undo `delay_aborts`, after faulthandler was disabled."""
    if _LIBC is not None:
        _LIBC.signal(signal.SIGABRT, None)


def is_abort(report: str | os.PathLike[str]) -> bool:
    """Return True if faulthandler has begun to write the report of an abort to a file."""
    with open(report, "rb") as file:
        return file.read(len(_REPORT)) == _REPORT


def end_aborted() -> None:
    """End this process by SIGABRT, while the thread that aborts sleeps."""
    abort_at_once()
    os.kill(os.getpid(), signal.SIGABRT)
