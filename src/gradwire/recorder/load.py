"""Reading dumps: pickles of plain containers and scalars, and of nothing else.

A pickle can name any function to be called when it is read; a dump is a file that others may have
written. So names are refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

from gradwire.errors import ArgumentError

MAX_BYTES = 1 << 28
"""A larger file is no dump: those of 2,000 collectives take 2 MB."""


class _PlainUnpickler(pickle._Unpickler):
    """The one in Python: that in C takes as much memory as some bytes in a damaged file say."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: read
        for code, read in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # this one as well
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump names nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def loads(data: bytes) -> dict[str, Any]:
    """A dump from its bytes.

    Raises:
        ArgumentError: They are no dump.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # pickle raises whatever its reader stumbles over
        raise ArgumentError(f"not a dump of a flight recorder: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise ArgumentError("not a dump of a flight recorder: it has no list of entries")
    return found


def load(path: Path) -> dict[str, Any]:
    """A dump from its file.

    Raises:
        ArgumentError: It is no dump.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ArgumentError(f"{path} has {path.stat().st_size} bytes: no dump of a flight recorder")
    try:
        return loads(path.read_bytes())
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
