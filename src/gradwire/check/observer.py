"""Recording of what one rank does: events in a file, and patches that are removed at the end.

Observing changes no result: it draws no random numbers, sends nothing, adds nothing to a graph, and
runs outside the program's contexts. An observation that fails is recorded and given up; the program
continues.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradwire._containers import tensors_in
from gradwire._scope import runs_outside_contexts
from gradwire.recorder import is_users

LIMIT_PREFIX = "limit-"
"""Beginning of the name of a file that a rank makes after the last step that is observed."""
ALONE = "alone"
"""Name of the parameters of an optimizer that no wrapped model has."""
CRC_BYTES = 1 << 16
"""Largest tensor whose digest is a checksum: for small ones a checksum takes 1 µs, a sum 6 µs."""
SAMPLE_ELEMENTS = 1024
"""Number of elements of a sample, at equal distances, that enter its digest."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Observer:
    """Context in which a rank's actions are written to `rank-N.jsonl`."""

    def __init__(self, folder: Path, rank: int, *, steps: int = 0) -> None:
        self.step = 0  # number of optimizer steps so far
        self.active = False
        self._limit = steps  # 0 for all
        self._rank = rank
        self._path = folder / f"rank-{rank}.jsonl"
        self.busy = False
        self.random: list[int] | None = None  # random state when it was last looked at
        self._thread = 0
        self._failed: set[str] = set()
        self.undo: list[Callable[[], None]] = []  # called when observing ends

    def __enter__(self) -> Observer:
        # of torch.compile, about the hook that watches calls; it does nothing in graphs
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        self._file = self._path.open("a", encoding="utf-8")  # data loaders' workers, too
        self._thread = threading.get_ident()
        self.active = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        text = "" if ended_well else repr(error)[:500]
        self.emit("end" if ended_well else "error", error=text, time=time.time())
        self.active = False
        while self.undo:
            self.undo.pop()()
        self._file.close()

    def emit(self, kind: str, *, line: str | None = None, **fields: Any) -> None:
        """Write an event, with the user's line and the number of steps so far."""
        if self.active:
            place = user_line() if line is None else line
            self._file.write(json.dumps({"kind": kind, "step": self.step, "line": place} | fields))
            self._file.write("\n")
            self._file.flush()  # the process may be killed in its next collective

    def stepped(self) -> None:
        """Count an optimizer step, and stop after the last one that is observed."""
        self.step += 1
        if self.step == self._limit:
            self.emit("limit", line="")
            self.active = False
            self._path.with_name(f"{LIMIT_PREFIX}{self._rank}").touch()

    def look(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that observes; record its error instead of raising it in the program."""
        # first, so that nothing else becomes part of a graph
        if torch.compiler.is_compiling() or not self.active or self.busy:
            return None
        if threading.get_ident() != self._thread or function.__name__ in self._failed:
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return None  # reading a value would end the capture
        self.busy = True
        try:
            return _outside(function, *args, **kwargs)
        except Exception as error:
            self._failed.add(function.__name__)
            self.emit("blind", probe=function.__name__, error=repr(error)[:500])
            return None
        finally:
            self.busy = False

    def patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name`, or that of each of a tuple, by `make(original)` until the end."""
        owners = owner if isinstance(owner, tuple) else (owner,)
        original = next(getattr(each, name) for each in owners if hasattr(each, name))
        patched = functools.wraps(original)(make(original))

        def undo(owner: Any) -> None:
            if getattr(owner, name) is patched:  # not if gradwire.compat has replaced it meanwhile
                setattr(owner, name, original)

        for each in owners:
            if getattr(each, name, None) is original:
                setattr(each, name, patched)
                self.undo.append(functools.partial(undo, each))

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> None:
        """Call `before(...)` and `after(result, ...)` with the arguments of each `owner.name`."""

        def make(original: Any) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    self.look(before, *args, **kwargs)
                result = original(*args, **kwargs)
                if after is not None:
                    self.look(after, result, *args, **kwargs)
                return result

            return called

        self.patch(owner, name, make)


@runs_outside_contexts
def _outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return function(*args, **kwargs)


def user_line() -> str:
    """Return the innermost line of the user's own code, as "file:line"; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else line_of(frame)


def line_of(frame: FrameType) -> str:
    """Return a frame's line, as "file:line"."""
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_plain(tensor: Any) -> bool:
    """Return True if a tensor has memory of its own that can be read."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _as_integers(tensor: Tensor) -> Tensor:
    bits = tensor.detach().resolve_conj().resolve_neg()
    if bits.dtype == torch.complex128:
        bits = torch.view_as_real(bits)
    return bits.view(_INTEGERS[bits.element_size()])


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the bits as integers: the same for any order of the elements."""
    return int(_as_integers(tensor).sum(dtype=torch.int64))


def digest(tensor: Any) -> int | None:
    """Return a number that is equal for equal bits; None for tensors that cannot be read."""
    if not is_plain(tensor):
        return None
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or size > CRC_BYTES:
        return bit_sum(tensor)
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32((ctypes.c_char * size).from_address(bits.data_ptr())) if size else 0


def digest_all(value: Any) -> int:
    """Return a digest of the tensors in nested containers; 0 if there are none."""
    found = [digest(tensor) for tensor in tensors_in(value)]
    return zlib.crc32(repr(found).encode()) if found else 0


def sample_digests(batch: Any) -> list[int]:
    """Return a digest of each sample, an index of the first dim of all tensors; [] if none."""
    tensors = [t for t in tensors_in(batch) if is_plain(t) and t.dim()]
    if not tensors or any(len(t) != len(tensors[0]) for t in tensors) or not len(tensors[0]):
        return []
    total = torch.zeros(len(tensors[0]), dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        bits = _as_integers(tensor).reshape(len(tensor), -1)
        bits = bits[:, :: max(1, bits.shape[1] // SAMPLE_ELEMENTS)].to("cpu", torch.int64)
        weights = torch.arange(bits.shape[1], dtype=torch.int64) * 0x9E3779B1 + 2 * number + 1
        total += (bits * weights).sum(1)
    return total.tolist()


def random_state() -> list[int]:
    """Return digests of the states of the default generators, without drawing from them."""
    states = [digest(torch.get_rng_state()) or 0, hash(random.getstate()[1])]
    if torch.cuda.is_initialized():
        states[0] ^= digest(torch.cuda.get_rng_state()) or 0
    if "numpy" in sys.modules:
        words = sys.modules["numpy"].random.get_state()
        states.append(zlib.crc32(words[1].tobytes()) ^ words[2])
    return states


def drawn(before: list[int], after: list[int]) -> list[int | None] | None:
    """Return the states before draws, None for generators that were not used; None if none was."""
    if before == after:
        return None
    return [one if one != other else None for one, other in zip(before, after, strict=False)]
