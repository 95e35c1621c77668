"""Entry point that PyTorch calls at the end of `import torch` where gradwire is installed.

It registers the backend "shm" with torch.distributed, for programs that name it without importing
gradwire, and reads environment variables:

- GRADWIRE_COMPAT=1 calls `gradwire.compat.install()`.
- GRADWIRE_BACKEND=shm replaces Gloo by shm for CPU tensors.
- GRADWIRE_LAUNCHER is set by `gradwire run` to its process ID: ranks end when that process ends.
- GRADWIRE_ELASTIC_REPORTS is set by the supervisor of an elastic run: errors are reported to it.
- GRADWIRE_RECORDER=DIR makes `gradwire.recorder` write dumps to DIR, and GRADWIRE_TIMELINE=FILE a
  timeline to FILE.

This module is outside the package because every process that imports torch runs it, and a module
of the package would import the package. It has no import of gradwire: functions of the package are
looked up by name when they are called, when the first group is made or by a variable above.
Errors in this module must not stop `import torch`, except for variables with invalid values.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def load() -> None:
    """Register shm and apply the environment variables; warn about errors.

    Raises:
        ValueError: GRADWIRE_COMPAT or GRADWIRE_BACKEND has an invalid value.
    """
    backend, compat = check_variables()
    _try(_end_with_launcher, "this rank would outlive its launcher")
    _try(register_shm, "the backend shm is not registered")
    if backend:
        _try(_stand_in_for_gloo, "GRADWIRE_BACKEND=shm has no effect")
    if os.environ.get("GRADWIRE_RECORDER") or os.environ.get("GRADWIRE_TIMELINE"):
        _try(_start_recorder, "GRADWIRE_RECORDER and GRADWIRE_TIMELINE have no effect")
    if os.environ.get("GRADWIRE_ELASTIC_REPORTS"):
        _try(_report_errors, "the supervisor will not know this process's errors")
    if compat:
        _try(_install_compat, "GRADWIRE_COMPAT=1 has no effect")


def check_variables() -> tuple[bool, bool]:
    """Return True for each of GRADWIRE_BACKEND and GRADWIRE_COMPAT that is on.

    Raises:
        ValueError: One of them has an invalid value.
    """
    return _is_on("GRADWIRE_BACKEND", "shm", "gloo"), _is_on("GRADWIRE_COMPAT", "1", "0")


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


def _report_errors() -> None:
    _call("gradwire.elastic.supervisor", "end_with_reports")


def _install_compat() -> None:
    _call("gradwire.compat", "install")


def _call(module: str, function: str, *args: Any) -> Any:
    """Import a module of gradwire and call one of its functions."""
    return getattr(importlib.import_module(module), function)(*args)


def _c10d() -> Any:
    """Return the c10d module, loaded by `import torch`; None if this torch lacks it."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _is_on(variable: str, on: str, off: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", on, off):
        raise ValueError(f"{variable} is {value!r}: set it to {on} or {off}, or unset it")
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
