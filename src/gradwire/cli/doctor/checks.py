"""Checks of limits, cores, threads, memory, interfaces and name lookups of this machine."""

from __future__ import annotations

import array
import fcntl
import os
import platform
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from gradwire._limits import check_available, cores
from gradwire._torch import NEWEST_TESTED
from gradwire.shm import is_available, with_shm

GOOD, WARN, BAD = "ok", "warning", "problem"
_DESCRIPTORS_A_RANK = 64  # per group; each peer needs a socket and descriptors of its memory
_SLOW_LOOKUP = 1.0
_LOOKUP_LIMIT = 6.0
_LITTLE_MEMORY = 1 << 30
_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 1


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: Name of the check.
        state: `GOOD`, `WARN` or `BAD`.
        found: Observed value.
        remedy: Advice if the state is not `GOOD`.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def run_checks(nproc: int) -> list[Check]:
    """Run all checks for `nproc` processes on this machine."""
    return [
        _versions(),
        _system(),
        _autoload(),
        _default_backend(),
        _cores(nproc),
        _load(),
        _threads(nproc),
        _memory(),
        _descriptors(nproc),
        _temporary(),
        _interface(),
        _name_lookup(),
    ]


def _versions() -> Check:
    found = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        return Check("versions", WARN, found, f"tested up to PyTorch {newest}: upgrade gradwire")
    return Check("versions", GOOD, found)


def _system() -> Check:
    found = f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    if is_available():
        return Check("shared memory", GOOD, f"{found}; independent of the size of /dev/shm")
    remedy = "shm needs 64-bit Linux with glibc 2.30: use Gloo"
    return Check("shared memory", BAD, found, remedy)


def _autoload() -> Check:
    points = entry_points(group="torch.backends")
    found = any(point.value.startswith("gradwire_autoload:") for point in points)
    on = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if found and on:
        return Check("import torch", GOOD, "registers shm and reads GRADWIRE_*")
    why = "gradwire is not installed" if not found else "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
    remedy = "install gradwire, or unset the variable, or import gradwire in programs"
    return Check("import torch", WARN, f"does not load gradwire: {why}", remedy)


def _default_backend() -> Check:
    """Show the backend that `init_process_group("gloo")` of a plain program gets."""
    asked = 'init_process_group("gloo") uses '
    name = "default backend"
    if os.environ.get("GRADWIRE_BACKEND") != "shm":
        return Check(name, GOOD, f"{asked}Gloo; with GRADWIRE_BACKEND=shm, it uses shm")
    if with_shm("gloo") != "shm" or _autoload().state != GOOD:
        return Check(name, WARN, f"{asked}Gloo, although GRADWIRE_BACKEND is shm", "see above")
    return Check(name, GOOD, f"{asked}shm, because GRADWIRE_BACKEND is shm")


def _load() -> Check:
    load = os.getloadavg()[0]
    found = f"{load:.1f} on average in the last minute"
    if load > cores():
        remedy = "other programs use the cores: times and failures above may be theirs"
        return Check("load", WARN, found, remedy)
    return Check("load", GOOD, found)


def _cores(nproc: int) -> Check:
    usable = cores()
    found = f"{usable:g} usable (of {os.cpu_count()}), {nproc} ranks"
    if usable < nproc:
        remedy = "ranks share cores, so waits cost more: start fewer, or raise the limit"
        return Check("cores", WARN, found, remedy)
    return Check("cores", GOOD, found)


def _threads(nproc: int) -> Check:
    given = os.environ.get("OMP_NUM_THREADS")
    each = int(given) if given and given.isdigit() else torch.get_num_threads()
    found = f"{each} PyTorch threads per rank" + ("" if given else " (OMP_NUM_THREADS is not set)")
    if each * nproc > max(cores(), nproc):
        remedy = f"{each * nproc} threads on {cores():g} cores: set OMP_NUM_THREADS (torchrun: 1)"
        return Check("threads", WARN, found, remedy)
    return Check("threads", GOOD, found)


def _memory() -> Check:
    try:
        check_available(_LITTLE_MEMORY)
    except MemoryError as error:
        return Check("memory", WARN, str(error), "shm rejects what does not fit: raise the limit")
    return Check("memory", GOOD, "more than 1 GiB is available to this process")


def _descriptors(nproc: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _DESCRIPTORS_A_RANK + 8 * nproc
    unlimited = resource.RLIM_INFINITY
    found = f"{soft} open files (hard limit: {'none' if hard == unlimited else hard})"
    if soft != unlimited and soft < needed:
        most = 4096 if hard == unlimited else min(hard, 4096)
        raised = f"ulimit -n {most}" if most >= needed else "raise the hard limit, as root"
        return Check("limits", BAD, found, f"{nproc} ranks need about {needed}: {raised}")
    return Check("limits", GOOD, found)


def _temporary() -> Check:
    try:
        return Check("temporary files", GOOD, tempfile.gettempdir())
    except OSError:
        remedy = "set TMPDIR to a folder: torchrun, data loaders and compilers need one"
        return Check("temporary files", BAD, "no writable folder", remedy)


def _interface() -> Check:
    """Check the interface that Gloo binds to: the configured one, or that of the host's name."""
    up = dict(_interfaces())
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    listed = ", ".join(f"{name} ({address})" for name, address in up.items()) or "none"
    if named:
        missing = [name for name in named.split(",") if name not in up]
        if missing:
            remedy = f"set it to an interface that is up and has an address: {listed}"
            found = f"GLOO_SOCKET_IFNAME is {named!r}, which is not up"
            return Check("interface", BAD, found, remedy)
        return Check("interface", GOOD, f"GLOO_SOCKET_IFNAME is {named!r}; up: {listed}")
    if not up:
        remedy = "Gloo and torchrun need at least lo (ip link set lo up); shm needs none"
        return Check("interface", BAD, "no interface is up", remedy)
    address = _address_of_host()
    by_address = {a: name for name, a in up.items()}
    if address in by_address or address.startswith("127."):
        found = f"Gloo binds to {by_address.get(address, 'lo')} ({address}); up: {listed}"
        if address.startswith("127.") and len(up) > 1:
            remedy = "between hosts, set GLOO_SOCKET_IFNAME"
            return Check("interface", GOOD, found, remedy)
        return Check("interface", GOOD, found)
    found = f"the host's name resolves to {address or 'no address'}, on no interface; up: {listed}"
    return Check("interface", WARN, found, "set GLOO_SOCKET_IFNAME to one that is up")


def _name_lookup() -> Check:
    """Check the time to resolve the host's name, which Gloo does for each group."""
    name, since, errors = socket.gethostname(), time.perf_counter(), list[OSError]()

    def look_up() -> None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=look_up, daemon=True)  # abandoned after the limit
    thread.start()
    thread.join(_LOOKUP_LIMIT)
    state = WARN
    if thread.is_alive():
        found = f"{name}: no answer within {_LOOKUP_LIMIT:g} s"
    elif errors:
        found = f"{name}: {errors[0].strerror or errors[0]}"
    else:
        found, state = f"{name} in {1e3 * (time.perf_counter() - since):.0f} ms", GOOD
    if time.perf_counter() - since > _SLOW_LOOKUP:
        state = WARN
    remedy = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME" if state == WARN else ""
    return Check("name lookup", state, found, remedy)


def _address_of_host() -> str:
    try:
        return str(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return ""


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield interfaces that are up, with their addresses."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name[:15].encode()))
            try:
                fcntl.ioctl(asking, _SIOCGIFFLAGS, request)
                (flags,) = struct.unpack_from("<H", request, 16)
                fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # no address
                continue
            if flags & _IFF_UP:
                yield name, socket.inet_ntoa(bytes(request[20:24]))
