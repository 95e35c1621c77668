"""The end of a process while threads of Gloo have something to do still."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire import _gloo_threads

# Two members of a group in one process. A callback of `one` runs on a thread of Gloo, and needs the
# GIL, when the program ends.
AT_WORK_AT_THE_END = """
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist

import gradwire

store = dist.HashStore()
with ThreadPoolExecutor(2) as threads:
    one, other = threads.map(
        lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)
    )
begun = threading.Event()

def busy(future):
    begun.set()
    until = monotonic() + 0.3
    while monotonic() < until:
        pass

work = one.allreduce(torch.ones(4))
work.get_future().then(busy)
other.allreduce(torch.ones(4)).wait()
assert begun.wait(30)
"""


def test_a_process_ends_well_while_a_thread_of_gloo_is_at_work(run):
    ended = run(AT_WORK_AT_THE_END)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_collective_that_nobody_waited_for_does_not_hold_up_the_end(monkeypatch):
    """Its thread waits for the other rank: it is asleep as long as that does not come."""
    monkeypatch.setattr(_gloo_threads, "_LIMIT_SECONDS", math.inf)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(
            lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)
        )
    work = one.allreduce(torch.ones(4))
    assert _gloo_threads._look()
    _gloo_threads.await_gloo_threads()
    assert not work.is_completed()
    other.allreduce(torch.ones(4)).wait()
    work.wait()


def test_a_process_without_gloo_does_not_wait(run):
    ended = run("import time, gradwire\ntime.sleep = None  # an error where it is called\n")
    assert (ended.returncode, ended.stderr) == (0, "")
