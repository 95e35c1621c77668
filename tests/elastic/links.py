"""Connections of members that are cut: reset at once, or silent because a network is down.

Members whose network is their own are connected by a bridge, which lies in the network of the
calling process: start it with `unshare --net`, so that nothing is left when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import shutil
import socket
import subprocess

from gradwire._processes import wait_until

STORE = "10.78.0.1"
"""Address of the calling process on the bridge."""
DEVICE = "eth0"
_SUBNET = STORE.rpartition(".")[0]
_NUMBERS = itertools.count()
_CLONE_NEWNET = 0x40000000
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_cut() -> bool:
    """Return True if this process may reset connections of its children."""
    return os.getuid() == 0 and all(map(shutil.which, ("ss", "ip", "nsenter", "unshare")))


def make_bridge() -> None:
    """Make the bridge in the network of this process, which is new."""
    assert len(socket.if_nameindex()) == 1, "start this process with `unshare --net`"
    _run("ip link set lo up")
    # otherwise its address is that of one of its links, and changes when a member ends
    _run("ip link add bridge0 address 02:00:00:00:00:01 type bridge")
    _run(f"ip addr add {STORE}/24 dev bridge0")
    _run("ip link set bridge0 up")


def leave_network() -> None:
    """Give the calling process a network of its own, and wait until it is connected."""
    if _LIBC.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    assert wait_until(_is_connected, 30, 0.005), "this process got no network"


def _is_connected() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex((STORE, 9)) == 0  # sends nothing


def connect_network(pid: int) -> None:
    """Connect a process that calls `leave_network` to the bridge."""
    mine = os.readlink("/proc/self/ns/net")
    own = wait_until(lambda: os.readlink(f"/proc/{pid}/ns/net") != mine, 30, 0.005)
    assert own, f"process {pid} has no network of its own"
    _run(f"ip link add member{pid} type veth peer name {DEVICE} netns {pid}")
    _run(f"ip link set member{pid} master bridge0 up")
    inside = f"nsenter -t {pid} --net ip"
    _run(f"{inside} link set lo up")
    _run(f"{inside} addr add {_SUBNET}.{2 + next(_NUMBERS) % 250}/24 dev {DEVICE}")
    _run(f"{inside} link set {DEVICE} up")


def switch_network(pid: int, state: str) -> None:
    """Set the network of a process "down" or "up"; nothing if the process has ended."""
    command = ["ip", "link", "set", f"member{pid}", state]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def reset(pid: int, store_port: int, chance: random.Random, *, store: bool) -> int:
    """Reset connections of a process, and return their number.

    Args:
        pid: The process.
        store_port: Port of the store.
        chance: Draws which of the connections to other members: one or all.
        store: True to reset the connection to the store instead.
    """
    to_store, to_members = [], []
    with contextlib.suppress(OSError):
        for connection in _connections(pid):
            ports = _ports(connection)
            (to_store if store_port in ports else to_members).append((connection, ports))
    chosen = to_store if store else to_members
    if chosen and not store and chance.random() < 0.5:
        chosen = [chance.choice(chosen)]
    for connection, ports in chosen:
        with contextlib.suppress(OSError):
            if ports:
                pair = f"sport = :{ports[0]} and dport = :{ports[1]}"
                command = ["nsenter", "-t", str(pid), "--net", "ss", "-K", pair]
                subprocess.run(command, capture_output=True, check=False)
            else:
                connection.shutdown(socket.SHUT_RDWR)
    for connection, _ in (*to_store, *to_members):
        connection.close()
    return len(chosen)


def _connections(pid: int) -> list[socket.socket]:
    """Return the connected sockets of another process."""
    found = []
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                fd = _LIBC.syscall(_PIDFD_GETFD, process, int(name), 0)
                if fd < 0:
                    continue
                connection = socket.socket(fileno=fd)
                if _is_to_another(connection):
                    found.append(connection)
                else:
                    connection.close()
    finally:
        os.close(process)
    return found


def _is_to_another(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return connection.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


def _ports(connection: socket.socket) -> tuple[int, ...]:
    if connection.family == socket.AF_UNIX:
        return ()
    return connection.getsockname()[1], connection.getpeername()[1]


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
