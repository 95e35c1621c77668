"""Groups of generations: their destruction."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.elastic.runtime import GenerationGroup, form_gloo


def form_pair(timeout: timedelta) -> list[GenerationGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        forming = [
            pool.submit(form_gloo, rank, 2, 1, store, timeout, lambda: None) for rank in range(2)
        ]
        return [future.result() for future in forming]


def test_the_last_reference_to_a_group_in_a_collective_does_not_block() -> None:
    """The sum of gradients, a model and a traceback may hold it longer than the generation does."""
    first, second = form_pair(timedelta(seconds=120))
    assert first.group is not None
    model = nn.Module()
    model.process_group = first.group
    work = first.group.allreduce([torch.ones(1)])  # the other does not take part
    first.leave(failed=False)
    began = time.monotonic()
    del model
    assert time.monotonic() - began < 60
    second.leave(failed=True)  # ends the collective
    with pytest.raises(RuntimeError):
        work.wait()


EXITS = """
import os, time
from gradwire._groups import destroy_in_thread

class Owner: pass

class Backend:
    def __del__(self):
        time.sleep(0.5)
        os.write(1, b"destroyed")

owner = Owner()
destroy_in_thread(owner, Backend())
del owner
"""


def test_a_process_exits_after_its_backends_are_destroyed() -> None:
    """Gloo's destructor takes the GIL: the process was aborted, after a run that was done."""
    ended = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, check=True)
    assert ended.stdout == b"destroyed"
