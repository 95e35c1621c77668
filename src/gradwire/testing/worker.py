"""A rank's process: takes tasks from its channel, one after the other, until its parent is gone.

Run as `python -m gradwire.testing.worker CHANNEL LIFELINE`, two inherited descriptors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import itertools
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.errors import ArgumentTypeError
from gradwire.testing.channel import Channel, Idle, Raised, Returned, Task
from gradwire.testing.pickling import load_cloudpickle

__all__ = ["main"]


def main(channel_fd: int, lifeline: int) -> None:
    """Serve tasks; ends with the process."""
    _die_with_parent(lifeline)
    os.set_inheritable(channel_fd, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Tests let ranks crash on purpose: the stack is in the log, no core file is left behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.freeze()  # what is imported by now stays: the collection after each call is quick
    channel.send(Idle())
    # The parent ends this process; an end-of-file here means that it is already gone.
    with contextlib.suppress(EOFError):
        for earlier in itertools.count():
            task = channel.receive()
            assert isinstance(task, Task)
            store = _unused_number(channel.receive_descriptor(), earlier)
            imported = len(sys.modules)
            _serve(channel, task, store)
            if len(sys.modules) > imported:
                # What a task imports stays too. torch.compile's modules, which torch's DDP imports
                # as well, would cost every later collection 50 ms and more, a fresh worker's 3 ms.
                gc.freeze()
            os.close(store)
            channel.send(Idle())
    os._exit(0)


def _die_with_parent(lifeline: int) -> None:
    """End this process when the parent, which alone holds the pipe's other end, is gone."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    os.set_inheritable(lifeline, False)
    threading.Thread(target=watch, name="gradwire-lifeline", daemon=True).start()
    # The thread needs the GIL, which extension code may hold for good: have the kernel itself kill
    # this process when the pipe is closed. The thread is for a pipe that is closed already.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def _unused_number(descriptor: int, earlier: int) -> int:
    """Move the descriptor to a number that no earlier task's store had, nor any other file will.

    A group that outlives its task (an autograd graph in a reference cycle may hold it) says goodbye
    to its store when it goes, by the path of a descriptor: if another file had this number by then,
    torch would read that file as a store, without end. A path that is gone it leaves alone.
    """
    soft = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, soft // 2 + earlier % (soft // 4))
    os.close(descriptor)
    return number


def _serve(channel: Channel, task: Task, store: int) -> None:
    outcome = _outcome(task, store)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(outcome)
    if isinstance(outcome, Returned):
        # Other ranks may still need this one's connections. After an error it leaves at once
        # instead, so that they do not wait for it.
        channel.receive()
    elif not dist.is_initialized():
        # A group that failed to form leaves torch counting groups differently from other ranks.
        os._exit(1)
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        channel.send(_raised(error))
        os._exit(1)
    gc.collect()


def _outcome(task: Task, store: int) -> Returned | Raised:
    try:
        _prepare(task)
        with warnings.catch_warnings():
            fn, args = pickle.loads(task.call)
            _join(task, store)
            result = fn(*args)
        return Returned(_pickled_result(result))
    except BaseException as error:
        # SystemExit and the like too: a task ends, the process goes on.
        return _raised(error)


def _prepare(task: Task) -> None:
    """Make this process look like the caller's, and like itself before earlier calls."""
    os.chdir(task.directory)
    sys.path[:] = task.path
    _set_environment(task.environment)
    torch.set_num_threads(1)
    random.seed(task.rank)
    torch.manual_seed(task.rank)


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _join(task: Task, store: int) -> None:
    # Longer than the call may take: a hang is then shown where it is, not where it gives up.
    timeout = timedelta(seconds=task.timeout + 30)
    shared = dist.FileStore(f"/proc/self/fd/{store}")
    dist.init_process_group(
        task.backend,
        store=shared,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timeout,
    )
    # A rank that failed at once would else break the connections that another still makes.
    if shared.add("joined", 1) == task.world_size:
        shared.set("all joined", "")
    while not shared.check(["all joined"]):
        time.sleep(0.001)


def _pickled_result(result: object) -> bytes:
    try:
        data: bytes = load_cloudpickle().dumps(result)
    except Exception as error:
        raise ArgumentTypeError(
            f"fn returned a {type(result).__name__}, which cannot be pickled ({error}); "
            "return tensors, numbers or other values that can"
        ) from error
    return data


def _raised(error: BaseException) -> Raised:
    """The error as text and, if it survives the journey, as itself."""
    here = error.__traceback__
    stack = here.tb_next if here is not None else None  # without this file's own frame
    text = "".join(traceback.format_exception(type(error), error, stack or here))
    data: bytes | None
    try:
        data = load_cloudpickle().dumps(error)
        pickle.loads(data)  # an exception with arguments of its own often fails only here
    except Exception:
        data = None
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    return Raised(summary, text.rstrip(), data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
