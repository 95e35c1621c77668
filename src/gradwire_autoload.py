"""Entry point that PyTorch calls at the end of `import torch` where gradwire is installed.

It registers the backend "shm" with torch.distributed, for programs that name it without importing
gradwire, and reads five environment variables:

- GRADWIRE_COMPAT=1 calls `gradwire.compat.install()`.
- GRADWIRE_BACKEND=shm replaces Gloo by shm for CPU tensors.
- GRADWIRE_LAUNCHER is set by `gradwire run` to its process ID: ranks end when that process ends.
- GRADWIRE_RECORDER=DIR makes `gradwire.recorder` write dumps to DIR, and GRADWIRE_TIMELINE=FILE a
  timeline to FILE.

This module is outside the package because every process that imports torch runs it, and a module
of the package would import the package. It has no import of gradwire: functions of the package are
looked up by name when they are called, when the first group is made or by a variable above.
Errors in this module must not stop `import torch`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

_PR_SET_PDEATHSIG = 1


def load() -> None:
    """Register shm and apply the environment variables; warn about errors."""
    _try(_end_with_launcher, "this rank would outlive its launcher")
    _try(register_shm, "the backend shm is not registered")
    if _asked_for("GRADWIRE_BACKEND", on="shm", off=("", "gloo")):
        _try(_stand_in_for_gloo, "GRADWIRE_BACKEND=shm has no effect")
    if os.environ.get("GRADWIRE_RECORDER") or os.environ.get("GRADWIRE_TIMELINE"):
        _try(_start_recorder, "GRADWIRE_RECORDER and GRADWIRE_TIMELINE have no effect")
    if _asked_for("GRADWIRE_COMPAT", on="1", off=("", "0")):
        _try(_install_compat, "GRADWIRE_COMPAT=1 has no effect")


def _end_with_launcher() -> None:
    """Make the kernel kill this process when the `gradwire run` that started it ends."""
    if os.environ.get("GRADWIRE_LAUNCHER") == str(os.getppid()) and sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def register_shm() -> None:
    """Register the backend "shm" once; do nothing if this torch lacks torch.distributed."""
    c10d = _c10d()
    if c10d is None or "shm" in c10d.Backend.backend_list:
        return
    backend = c10d.Backend
    if "GLOO" not in backend._plugins:  # torch registers none of its own backends there
        backend._plugins = _Unlisted(backend._plugins)
    backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
    # From 2.14 on, torch's flight recorder attaches to a backend that does not record itself. That
    # costs 30 µs per collective, misses direct calls of the backend, and duplicates gradwire's.
    if hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):
        c10d._FR_SELF_RECORDING_BACKENDS.add("shm")


class _Unlisted(dict[str, Any]):
    """Table of backend plugins that contains shm without listing it.

    Before 2.14, once any plugin is listed, torch gives a group of "cpu:gloo", or of another pair
    without NCCL, no default backend: such a group warns and has no sequence numbers.
    """

    def keys(self) -> Any:
        return [name for name in self if name != "SHM"]


def _create(options: object, of_caller: object) -> Any:
    """Create a group's shm backend; called by torch.distributed."""
    return _call("gradwire.shm.register", "create_backend", options, of_caller)


def _stand_in_for_gloo() -> None:
    """Make torch.distributed create shm groups instead of Gloo groups for CPU tensors."""
    c10d = _c10d()
    if c10d is None or hasattr(c10d._new_process_group_helper, "gradwire_stands_in"):
        return
    theirs = c10d._new_process_group_helper

    @functools.wraps(theirs)
    def make(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: str,
        *a: Any,
        **k: Any,
    ) -> Any:
        def original(name: str) -> Any:
            return theirs(group_size, group_rank, global_ranks_in_group, name, *a, **k)

        return _call("gradwire.shm.register", "make_group_without_gloo", original, backend)

    make.gradwire_stands_in = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make


def _start_recorder() -> None:
    importlib.import_module("gradwire.recorder")  # reads both variables


def _install_compat() -> None:
    _call("gradwire.compat", "install")


def _call(module: str, function: str, *args: Any) -> Any:
    """Import a module of gradwire and call one of its functions."""
    return getattr(importlib.import_module(module), function)(*args)


def _c10d() -> Any:
    """Return the c10d module, loaded by `import torch`; None if this torch lacks it."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _asked_for(variable: str, on: str, off: Iterable[str]) -> bool:
    value = os.environ.get(variable, "")
    if value != on and value not in off:
        _warn(f"{variable} is {value!r}, which is not a valid value: set it to {on}, or unset it")
    return value == on


def _try(what: Callable[[], None], otherwise: str) -> None:
    try:
        what()
    except Exception as error:
        _warn(f"gradwire is installed, but {otherwise}: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:  # warnings are errors: raising would stop `import torch`
        print(message, file=sys.stderr)
