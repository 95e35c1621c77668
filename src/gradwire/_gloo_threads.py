"""Wait for Gloo's threads at the end of the process.

A thread of Gloo releases a collective's tensors after `wait()` has returned, and takes the GIL to
do so. While the interpreter is being finalized, Python ends a thread that asks for the GIL. This
one is in a destructor, so that the process aborts
(https://github.com/pytorch/pytorch/issues/190489).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time

_TASKS = "/proc/self/task"
_NAME = "pt_gloo_runloop"
_PAUSE_SECONDS = 0.005
_LIMIT_SECONDS = 2.0


def await_gloo_threads() -> None:
    """Wait until all threads of Gloo in this process are idle or wait for other ranks."""
    # Without /proc, return at once; return after 2 s in any case, because a collective that nobody
    # waited for may not end.
    until = time.monotonic() + _LIMIT_SECONDS
    before = _look()
    while before and time.monotonic() < until:
        # The GIL is free meanwhile: a thread that needs it is seen running or has run in between.
        time.sleep(_PAUSE_SECONDS)
        now = _look()
        if now == before and all(asleep for asleep, _ in now.values()):
            return
        before = now


def _look() -> dict[str, tuple[bool, str]]:
    """Map each of Gloo's threads to its sleep state and its count of voluntary switches."""
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


# registered at import, and thus called after all functions that others register later
atexit.register(await_gloo_threads)
