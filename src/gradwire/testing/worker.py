"""A rank's process: runs the tasks from its channel one after the other, until its parent ends.

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
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire._gloo_threads import await_gloo_threads
from gradwire._processes import end_when_closed
from gradwire.errors import ArgumentTypeError
from gradwire.shm import Options
from gradwire.testing.channel import Channel, Idle, Raised, Returned, Task, load_cloudpickle


def main(channel_fd: int, lifeline: int) -> None:
    """Serve tasks; ends with the process."""
    end_when_closed(lifeline)
    os.set_inheritable(channel_fd, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # tests let ranks crash on purpose: the stack is in the log, a core file is not needed
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    gc.freeze()  # leaves the imported modules out of the collection after each call
    channel.send(Idle())
    # the parent kills this process; end-of-file here means that the parent has ended
    with contextlib.suppress(EOFError):
        for earlier in itertools.count():
            task = channel.receive()
            assert isinstance(task, Task)
            store = _unused_number(channel.receive_descriptor(), earlier)
            imported = len(sys.modules)
            _reset_signals(handlers)
            _serve(channel, task, store)
            if len(sys.modules) > imported:
                # modules that a task imports, too: torch.compile's, which torch's DDP imports,
                # make a collection take 50 ms and more, instead of 3 ms in a fresh worker
                gc.freeze()
            os.close(store)
            channel.send(Idle())
    os._exit(0)


def _reset_signals(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore the signal handlers that the previous task changed; SIGUSR1 shows the stacks."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)
    # by its own account faulthandler has it still, and `register` alone would do nothing
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _unused_number(descriptor: int, earlier: int) -> int:
    """Move the descriptor to a number that no earlier task's store had, nor any other file will.

    A group that outlives its task (an autograd graph in a reference cycle may hold it) writes to
    its FileStore when it is deleted, by the path of the descriptor. If another file had this number
    by then, torch would read that file as a store, without end; it skips a path that is gone.
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
        # other ranks may still need this one's connections; after an error it leaves at once, so
        # that they do not wait for it
        channel.receive()
    elif not dist.is_initialized():
        # where a group was not formed, torch's count of groups differs from the other ranks'
        os._exit(1)
    # Gloo's destructor keeps the GIL while it waits for threads, which may need it once more
    await_gloo_threads()
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
    """Set the caller's directory, path and environment, and reset threads and seeds."""
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
    # longer than the call may take: its error shows where a rank hangs, not a group's timeout
    timeout = timedelta(seconds=task.timeout + 30)
    shared = dist.FileStore(f"/proc/self/fd/{store}")
    options = Options(host=task.host) if task.host else None
    dist.init_process_group(
        task.backend,
        store=shared,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timeout,
        pg_options=options,
    )
    # wait for all: a rank that fails at once would break connections that others still make
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
    """Return the error as text and, if it can be pickled and unpickled, as an object."""
    here = error.__traceback__
    stack = here.tb_next if here is not None else None  # without the frame of this module
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
