"""Gloo's threads at the end of the process.

A thread of Gloo lets go of a collective's tensors after `wait()` has returned, and takes the GIL to
do so. Once the interpreter is being finalized, Python ends a thread that asks for the GIL, and as
this one is in a destructor, the process is aborted
(https://github.com/pytorch/pytorch/issues/190489).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time

__all__ = ["await_gloo_threads"]

_TASKS = "/proc/self/task"
_NAME = "pt_gloo_runloop"
_PAUSE_SECONDS = 0.005
_LIMIT_SECONDS = 2.0


def await_gloo_threads() -> None:
    """Wait until all threads of Gloo in this process wait for work, or for other ranks.

    Between two looks this thread sleeps, so that the GIL is free: one that asks for it, or has more
    to do, is seen to run, or to have run. Ends after 2 s in any case: a collective that nobody
    waited for may go on. Without effect where there is no /proc.
    """
    until = time.monotonic() + _LIMIT_SECONDS
    before = _look()
    while before and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
        now = _look()
        if now == before and all(asleep for asleep, _ in now.values()):
            return
        before = now


def _look() -> dict[str, tuple[bool, str]]:
    """Whether each thread of Gloo sleeps, and how often it began to, by its number."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # no Linux
        for thread in os.listdir(_TASKS):
            # OSError: it has ended since
            with contextlib.suppress(OSError), open(f"{_TASKS}/{thread}/status") as file:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
                if fields["Name"] == _NAME:
                    asleep = fields["State"].startswith("S")
                    found[thread] = asleep, fields["voluntary_ctxt_switches"]
    return found


# Registered when gradwire is imported, and so called after what others have registered since.
atexit.register(await_gloo_threads)
