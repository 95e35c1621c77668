"""Ranks forked from processes that have imported PyTorch, in place of new ones that import it.

A rank that a test ends is replaced before the next one; to import PyTorch takes 1.6 s of a core.
Ranks of even and of odd number come from two processes, so that their sets of strings differ in
order as elsewhere.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, ClassVar

_PR_SET_CHILD_SUBREAPER = 36
_IMPORTED = ("GRADWIRE_", "TORCH_")  # variables that are read at imports
_PYTHON = sys.executable
_SERVER = "from forked_ranks import serve; import sys; serve(int(sys.argv[1]))"


class ForkedRank(subprocess.Popen[bytes]):
    """Process of a rank. With a prefix, and in tests of `run_ranks` itself, it starts as usual."""

    servers: ClassVar[dict[tuple[object, ...], tuple[socket.socket, subprocess.Popen[bytes]]]] = {}
    numbers = itertools.count()

    def __init__(self, command: list[str], *, env: dict[str, str], **options: Any) -> None:
        here = os.environ.get("PYTEST_CURRENT_TEST", "")
        if command[0] != _PYTHON or here.startswith("tests/testing/"):
            super().__init__(command, env=env, **options)
            return
        read = sorted(item for item in env.items() if item[0].startswith(_IMPORTED))
        place = next(self.numbers) % 2, *read
        if place not in self.servers:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # children of children become ours
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                start = [_PYTHON, "-c", _SERVER, str(theirs.fileno())]
                server = subprocess.Popen(start, env=env, pass_fds=[theirs.fileno()])
            self.servers[place] = ours, server
        reading, writing = os.pipe()
        descriptors = [reading, options["stderr"].fileno(), *options["pass_fds"]]
        channel = self.servers[place][0]
        socket.send_fds(channel, [pickle.dumps(env)], descriptors)
        os.close(reading)
        self.args, self.returncode, self._child_created = command, None, True
        self.stdin = os.fdopen(writing, "wb")
        self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self.pid = pickle.loads(channel.recv(100))


def end_servers() -> None:
    """End the processes that ranks are forked from."""
    while ForkedRank.servers:
        channel, server = ForkedRank.servers.popitem()[1]
        channel.close()
        server.wait(20)


def serve(number: int) -> None:
    """Fork ranks on request, until the process that asks for them ends."""

    from gradwire import collectives, ddp, hooks  # noqa: F401
    from gradwire.testing.ranks import main

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=number)
    while True:
        request, descriptors, *_ = socket.recv_fds(channel, 1 << 18, 3)
        if not request:
            return
        reading, writing = os.pipe()
        if middle := os.fork():
            os.waitpid(middle, 0)
            channel.send(os.read(reading, 100))  # now that the rank has its new parent
            for descriptor in (reading, writing, *descriptors):
                os.close(descriptor)
        elif rank := os.fork():
            os.write(writing, pickle.dumps(rank))
            os._exit(0)
        else:
            channel.close()
            os.close(reading)
            os.close(writing)
            os.dup2(descriptors[0], 0)
            os.dup2(descriptors[1], 2)
            os.close(descriptors[0])
            os.close(descriptors[1])
            os.environ.clear()
            os.environ.update(pickle.loads(request))
            main(str(descriptors[2]), "")
