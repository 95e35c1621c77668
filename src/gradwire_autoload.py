"""What PyTorch runs at the end of `import torch`, wherever gradwire is installed.

It is an entry point of the group "torch.backends". It tells torch.distributed the name of the
backend "shm", for programs that name it and do not import gradwire, and reads five variables:

- GRADWIRE_COMPAT=1 calls `gradwire.compat.install()`.
- GRADWIRE_BACKEND=shm puts shm in Gloo's place for tensors of the CPU.
- GRADWIRE_LAUNCHER, which `gradwire run` sets to its process, has its ranks end with it.
- GRADWIRE_RECORDER=DIR has `gradwire.recorder` write its dumps there, and GRADWIRE_TIMELINE=FILE
  its timeline.

It is a module of its own because a module of the package would import the package, and every
process that imports torch runs this one: gradwire is imported when the first group is made, or
for GRADWIRE_COMPAT=1. Nothing that fails here may stop `import torch`.
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
    """Register shm and do what the variables ask for; what fails is a warning."""
    _try(_end_with_launcher, "this rank would outlive its launcher")
    _try(register_shm, "the backend shm is not registered")
    if _asked_for("GRADWIRE_BACKEND", on="shm", off=("", "gloo")):
        _try(_stand_in_for_gloo, "GRADWIRE_BACKEND=shm is without effect")
    if os.environ.get("GRADWIRE_RECORDER") or os.environ.get("GRADWIRE_TIMELINE"):
        _try(_start_recorder, "GRADWIRE_RECORDER and GRADWIRE_TIMELINE are without effect")
    if _asked_for("GRADWIRE_COMPAT", on="1", off=("", "0")):
        _try(_install_compat, "GRADWIRE_COMPAT=1 is without effect")


def _end_with_launcher() -> None:
    """Have the kernel end this process when `gradwire run`, which started it, is killed."""
    if os.environ.get("GRADWIRE_LAUNCHER") == str(os.getppid()) and sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def register_shm() -> None:
    """Tell torch.distributed the backend "shm", once; nothing if this torch has no distributed."""
    c10d = _c10d()
    if c10d is None or "shm" in c10d.Backend.backend_list:
        return
    backend = c10d.Backend
    if "GLOO" not in backend._plugins:  # torch registers none of its own backends there
        backend._plugins = _Unlisted(backend._plugins)
    backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
    # from 2.14 on, torch's flight recorder attaches to a backend that does not record itself: that
    # takes 30 µs for each collective, misses those that call the backend, and would be the second
    if hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):
        c10d._FR_SELF_RECORDING_BACKENDS.add("shm")


class _Unlisted(dict[str, Any]):
    """A table of backends that has shm's and does not list it.

    Before 2.14, torch gives a group of "cpu:gloo", or of another pair without NCCL, no default
    backend once anything is listed: such a group warns and has no sequence numbers.
    """

    def keys(self) -> Any:
        return [name for name in self if name != "SHM"]


def _create(options: object, of_caller: object) -> Any:
    """What torch.distributed calls for a group of "shm"."""
    from gradwire.shm.register import create_backend

    return create_backend(options, of_caller)


def _stand_in_for_gloo() -> None:
    """Have torch.distributed make shm groups where it would make Gloo groups of CPU tensors."""
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
        from gradwire.shm.gloo_replacement import make_group

        def original(name: str) -> Any:
            return theirs(group_size, group_rank, global_ranks_in_group, name, *a, **k)

        return make_group(original, backend)

    make.gradwire_stands_in = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make


def _start_recorder() -> None:
    importlib.import_module("gradwire.recorder")  # which reads them


def _install_compat() -> None:
    importlib.import_module("gradwire.compat").install()


def _c10d() -> Any:
    """torch.distributed's own module, which `import torch` has loaded if there is one."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _asked_for(variable: str, on: str, off: Iterable[str]) -> bool:
    value = os.environ.get(variable, "")
    if value != on and value not in off:
        _warn(f"{variable} is {value!r}, which has no meaning: set it to {on}, or leave it out")
    return value == on


def _try(what: Callable[[], None], otherwise: str) -> None:
    try:
        what()
    except Exception as error:
        _warn(f"gradwire is installed, but {otherwise}: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:  # where warnings are errors, this one would stop `import torch`
        print(message, file=sys.stderr)
